"""Tensors and callbacks that threads of gloo hold, for which a process that ends waits.

They are freed some time after a collective is done. The thread needs the interpreter for it, and if that is ending, the
process aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
from functools import partial
from typing import Any, TypeVar

#: The most seconds that a process that ends waits.
EXIT_SECONDS = 1.0

_LENT: dict[int, weakref.ref[Any]] = {}
_NUMBERS = itertools.count()

T = TypeVar("T")


def freed_before_exit(thing: T) -> T:
    """Return ``thing``, which a thread is about to hold. Nobody else should: the end of the process waits for it."""
    number = next(_NUMBERS)
    freed = partial(_LENT.pop, number)  # the names of this module may be gone when it is called
    _LENT[number] = weakref.ref(thing, freed)
    return thing


@atexit.register
def _wait_until_freed() -> None:
    until = time.monotonic() + EXIT_SECONDS  # a collective that hangs is not waited for
    while _LENT and time.monotonic() < until:
        time.sleep(0.001)
