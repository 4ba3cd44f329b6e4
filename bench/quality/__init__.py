"""Quality suite: how well training ends from right and wrong learning rates, with HDET and with other methods.

The flow, file by file:

    __main__.py   ``python -m bench.quality fetch | run | report``
    data/         download and parse the data sets
    tasks/        the tasks: data, loss and length of a run; models/ has their models, optimizers.py their optimizers
    suite.py      which runs are made (grid, wrong starts, other methods, …), as a list of jobs
    pool.py       run jobs in several processes
    spec.py       description of one run; train.py runs it, methods.py configures HDET
    peers.py      optimizers and schedules of other packages; peer_packages.py finds and downloads these packages
    sweep.py      sweeps at the cost of one run; bayesian.py proposes learning rates for one of them
    scalars.py    runs that explore other scalars than the learning rate
    results.py    a results file
    recovery.py   how much of the loss gap between a wrong and the best start is recovered
    tables.py     Markdown tables; report.py writes docs/quality.md with plots
"""
