"""Data of the tasks, which comes from pip and Debian packages.

source.py     a package: where it is found, and the files inside it
images.py     data sets of images, with their parsers
text.py       of text
tables.py     of tables
ranking.py    of documents to rank
series.py     of time series
packages.py   load a data set by name, download packages
"""

from __future__ import annotations

from bench.quality.data.packages import FOLDER, SOURCES, fetch, load, missing

__all__ = ["FOLDER", "SOURCES", "fetch", "load", "missing"]
