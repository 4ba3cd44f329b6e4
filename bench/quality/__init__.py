"""Quality suite: how well training ends from right and wrong learning rates, with HDET and with other methods.

The flow, file by file:

    __main__.py   ``python -m bench.quality fetch | run | observe | fit | replay``
    data/         download and parse the data sets
    tasks/        the tasks: data, loss and length of a run; models/ has their models, optimizers.py their optimizers
    sizes.py      which tasks, parts and seeds are run; suite.py lists the runs (grid, wrong starts, …) as jobs
    pool.py       run jobs in several processes; rows.py trains many plain runs of a task as rows of one stack
    spec.py       description of one run; train.py runs it, methods.py configures HDET
    peers.py      optimizers and schedules of other packages; peer_packages.py finds and downloads these packages
    sweep.py      sweeps at the cost of one run; bayesian.py proposes learning rates for one of them
    scalars.py    runs that explore other scalars than the learning rate
    results.py    a results file; selection.py finds records by their entries
    yardstick.py  the best learning rate of plain training, and its loss; excess.py measures all runs of the zoo by it
    held_out.py   constants fitted without the family of a task; replay.py tries a controller on recorded plain runs,
                  and designs.py compares designs of it that way
    bars.py       limits for the excess over the zoo
    page.py       docs/quality.md with its plots, and the tables that a run prints
"""
