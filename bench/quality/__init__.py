"""Quality suite: how well training ends from right and wrong learning rates, with HDET and with other methods.

The flow, file by file:

    __main__.py   ``python -m bench.quality fetch | run | report``
    data/         download and parse the data sets
    tasks/        the tasks: data, loss and length of a run; models/ has their models, optimizers.py their optimizers
    suite.py      which runs are made (grid, wrong starts, other methods, …), as a list of jobs
    pool.py       run jobs in several processes
    spec.py       description of one run; train.py runs it, methods.py configures HDET and its peers
    scalars.py    runs that explore other scalars than the learning rate; sweep.py is the equal-compute sweep
    results.py    a results file
    recovery.py   how much of the loss gap between a wrong and the best start is recovered
    tables.py     Markdown tables; report.py writes docs/quality.md with plots
"""
