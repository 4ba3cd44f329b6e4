"""A history as one HTML page: ``python -m hdet_kernels report history.jsonl``.

``read.py`` reads the records from a file, ``page.py`` puts the page together from tables (``tables.py``) and charts.
``charts.py`` says what each chart shows, ``drawing.py`` draws it as SVG, ``scale.py`` has the axes and ``style.py`` the
colours, for light and dark. The page needs nothing from outside: no script, no font, no image, no other file.
"""

from hdet_kernels.history_page.page import history_page, write_page
from hdet_kernels.history_page.read import read_history

__all__ = ["history_page", "read_history", "write_page"]
