"""Quality suite: how well training ends from right and wrong learning rates, with HDET and with other methods.

The flow, file by file:

    __main__.py   ``python -m bench.quality fetch | run | observe | fit | replay``
    data.py       download and parse the data sets
    tasks/        the tasks: data, loss and length of a run; models.py has their models
    suite.py      which tasks, parts and seeds are run, and the list of runs as jobs
    pool.py       run jobs in several processes; rows.py trains many plain runs of a task as rows of one stack
    train.py      one run; methods.py configures HDET
    peers.py      optimizers, and optimizers and schedules of other packages
    sweep.py      sweeps at the cost of one run
    scalars.py    runs that explore other scalars than the learning rate
    results.py    description of a run, and results files
    excess.py     the best learning rate of plain training, the excess of all runs of the zoo over it, and the goals
    observations.py  recorded plain runs at many learning rates; fit.py fits the constants of the controller to them
    held_out.py   constants fitted without the family of a task; designs.py tries designs of the controller on records
    page.py       docs/quality.md with its plots, and the tables that a run prints
"""
