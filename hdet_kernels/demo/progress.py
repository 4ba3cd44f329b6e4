"""Show a progress bar: one redrawn line on a terminal, a few lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_WIDEST_BAR = 28
_REDRAW_SECONDS = 0.1
_LOG_SHARE = 0.25


class Bar:
    """Progress of ``total`` steps, written to ``stream``."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label = label
        self.total = total
        self.stream = stream
        self.terminal = stream.isatty()
        self.full, self.empty = ("█", "░") if _can_write("█░", stream) else ("#", ".")
        self.start = time.monotonic()
        self.drawn = -1.0
        self.logged = 0.0

    def update(self, done: int, note: str) -> None:
        """Show that ``done`` steps are finished, with ``note`` behind the bar."""
        if self.terminal:
            now = time.monotonic()
            if done == self.total or now - self.drawn >= _REDRAW_SECONDS:
                self.drawn = now
                self._write(f"\r{self._line(done, note)}\x1b[K" + ("\n" if done == self.total else ""))
        elif done == self.total or done / self.total >= self.logged + _LOG_SHARE:
            self.logged = done / self.total
            self._write(self._line(done, note) + "\n")

    def _line(self, done: int, note: str) -> str:
        elapsed = time.monotonic() - self.start
        left = elapsed / done * (self.total - done) if done else 0.0
        when = f"{elapsed:.0f} s" if done == self.total else f"{left:.0f} s left"
        text = f"{done:>{len(str(self.total))}}/{self.total}  {note}  {when}"
        # A line that wraps cannot be redrawn.
        width = min(_WIDEST_BAR, shutil.get_terminal_size().columns - len(text) - 20) if self.terminal else _WIDEST_BAR
        filled = max(width, 0) * done // self.total
        bar = self.full * filled + self.empty * (width - filled)
        return f"{self.label:<18}{bar} {text}"

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
