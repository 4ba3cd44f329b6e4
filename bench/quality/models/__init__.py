"""Models of the tasks, small enough that a run takes seconds on a GPU.

blocks.py     layers that several models have
images.py     models of images
text.py       of text
recurrent.py  of text, with recurrent cells written out
tables.py     of tables
ranking.py    of items to rank
series.py     of time series
"""
