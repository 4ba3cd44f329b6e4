"""Train a model of GPT-2's shape, 124 M parameters, plainly and by HDET, from right and wrong learning rates.

python -m bench.gpt2 prepare                            # text of the installed packages, as tokens (bench-out/gpt2)
python -m bench.gpt2 time                               # a few steps, plain and stacked: ms, share of the peak
python -m bench.gpt2 resume                             # in one piece and in two: equal bit for bit?
python -m bench.gpt2 run plain --lr 3e-4 1e-3 3e-3 1e-2 # the grid
python -m bench.gpt2 run hdet --lr best 3x 10x none     # from the best of the grid, too high, and without any

``text.py`` makes tokens, ``model.py`` computes losses, ``train.py`` trains, and ``page.py`` writes table and plot from
the record, into which every command writes (``--out``). A command that ran out of ``--seconds`` goes on where it
stopped if it is given again. ``--tiny`` checks everything on a CPU in seconds.
"""
