"""The functions of the user that are called after every sync: ``scheduler.on_sync(callback)``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_callable, check_flag
from hdet_kernels.schedule.history.records import SyncRecord

SyncCallback = Callable[[SyncRecord], object]


class SyncCallbacks:
    """The callbacks of a scheduler, in the order in which they came.

    Attributes:
        running: whether callbacks are being called now.
    """

    def __init__(self) -> None:
        self._callbacks: OrderedDict[int, tuple[SyncCallback, bool]] = OrderedDict()  # with every_process
        self.running = False

    def add(self, callback: SyncCallback, every_process: bool | None) -> RemovableHandle:
        """Add a callback and return a handle that removes it; see :meth:`.WithCycle.on_sync`.

        Args:
            callback: the user's.
            every_process: False: only the first process calls it. None: as the callback's own ``every_process`` says.
        """
        check_callable("callback", callback, "callback(record), with a SyncRecord")
        if every_process is None:
            every_process = getattr(callback, "every_process", True)
        every_process = check_flag("every_process", every_process)
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = (callback, every_process)
        return handle

    def call(self, records: Iterable[SyncRecord], *, first: bool) -> None:
        """Call every callback with every record.

        Args:
            records: of the syncs.
            first: whether this is the first process.

        Raises:
            Exception: that of a callback, after all have been called; an ExceptionGroup if several raised.
        """
        failures: list[Exception] = []
        self.running = True
        try:
            for record in records:
                for callback, every_process in list(self._callbacks.values()):
                    try:
                        if every_process or first:
                            callback(record)
                    except Exception as error:
                        failures.append(error)
        finally:
            self.running = False
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several callbacks of on_sync raised", failures)
