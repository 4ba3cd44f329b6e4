"""Demo (``python -m hdet_kernels demo``): plain OneCycleLR and HDET from the same poor learning rate.

The flow, file by file:

    options.py      check the command line before any process starts
    command.py      run the demo: launch the replicas, print the table, write the files
      launch.py       start one process for each replica in one process group, collect messages and results
      training.py     train as one replica: first with plain DDP and OneCycleLR, then with HDET
        tasks.py        data and model: bytes of the standard library (transformer.py), or scikit-learn's digits
      progress.py     progress bar of each run
      outcome.py      merge the replicas' results; the table, the verdict and results.json
      plots.py        training_loss.png and learning_rates.png
"""
