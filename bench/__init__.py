"""Benchmarks of hdet_kernels: run suites, record them as JSON, and write tables, plots and documentation pages.

The flow, file by file:

    suites.py           the list of suites; each is a file test_<suite>.py, run by pytest-benchmark
    command.py          ``python -m hdet_kernels bench``: run suites, each in a process of its own
      measure.py          time calls: CUDA events, rounds, turns
      copy_bandwidth.py   measure the copy bandwidth that every time is compared with
      implementations.py  build the optimizer to be measured: torch's, ours on each backend, or a peer (peers.py)
      models.py           parameter shapes and models; training_steps.py has whole training steps
    records.py          read the recorded JSON (bench/results/ or the folder of a run)
    compare.py          compare two recorded runs
    tables.py           records as pandas frames and Markdown tables; plots.py draws them
    run_report.py       REPORT.md of one run
    pages.py            ``python -m bench.pages``: the pages of docs/ with measured figures, from bench/templates/
    stack_operations.py operations in a stack beside separate modules (stack_comparison.py), as a table
    cost_model.py       model the cost of averaging on up to 16 384 replicas; link_check.py checks it against gloo
    numerics.py         ``python -m bench.numerics``: errors of the update rules over many steps against float64
    quality/            measure how well training ends, not how fast
    gpt2/               a model of 124 M parameters from right and wrong learning rates

In the records, the key ``way`` names an implementation: ``torch-fused``, ``hdet-cuda``, or the name of a peer.
"""
