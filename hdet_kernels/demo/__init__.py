"""Demo (``python -m hdet_kernels demo``): plain OneCycleLR and HDET from the same poor learning rate.

The flow, file by file:

    command.py      run the demo: progress bars, the printed table, the files
    training.py     its options; one process for each replica; both runs, as one replica
    tasks.py        data and model: bytes of the standard library; and the digits of two examples
    outcome.py      merge the replicas' results: table, verdict, results.json, plots
"""
