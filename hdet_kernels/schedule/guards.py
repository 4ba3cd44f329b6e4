"""Notice what frameworks and loops do wrong: steps that do not go together, and a process group that comes late.

One scheduler step must follow each optimizer step. A framework that steps the scheduler once per process, per
micro-batch or per epoch would end the schedule too early or never. An optimizer step that does not happen is no
mistake: a ``GradScaler`` leaves out those whose gradients overflow, often several in a row. The counters are plain
integers, so that nothing waits for the device.

Frameworks and scripts initialise ``torch.distributed`` when training begins, often after the optimizer and its
scheduler were built. Such a scheduler begins as one replica and takes the default process group when it is first used.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import TensorWeakRef

from hdet_kernels.ensemble import Ensemble, announced_size
from hdet_kernels.torch_internals import times_written

log = logging.getLogger("hdet_kernels")

#: Optimizer steps in a row, each followed by two scheduler steps or more, after which it is no overflow any more; and
#: the scheduler steps too many among them.
FEWEST_REPEATS, MOST_AHEAD = 3, 8

#: Optimizer steps too many, in a row, after which the user is told.
MOST_BEHIND = 32

_ONCE = "call scheduler.step() once after each optimizer.step()"


class StepCount:
    """The steps of one scheduler and its optimizer since they were built or loaded.

    Nothing is raised before the first optimizer step was seen, nor after one was captured in a CUDA graph: replays of
    it are not seen.
    """

    def __init__(self) -> None:
        self.begin_anew()
        self._warned = False
        self._captured = False

    def begin_anew(self) -> None:
        """Forget the steps so far: a checkpoint was loaded."""
        self.seen = False  # whether an optimizer step was counted
        self.since_sync = 0  # optimizer steps since the last sync
        self._ahead = self._repeats = 0  # scheduler steps too many, and after how many optimizer steps in a row
        self._behind = 0  # optimizer steps too many, in a row
        self._after_optimizer = 0  # scheduler steps since the last optimizer step
        self._after_scheduler = 0  # optimizer steps since the last scheduler step
        self._param: Tensor | None = None  # one that had a gradient at the last step of the optimizer
        self._gradient: tuple[TensorWeakRef, int] | None = None  # that it had at the last step of the scheduler

    @property
    def counts(self) -> bool:
        """Whether every step of the optimizer is seen."""
        return self.seen and not self._captured

    def optimizer_stepped(self, groups: Iterable[dict[str, Any]]) -> None:
        """Count a step of the optimizer; warn once if the scheduler is not stepped.

        The gradients are there now. When the scheduler steps they may be cleared, and to find that of all parameters
        would take most of its time: one is remembered here.
        """
        if self._param is None or self._param.grad is None:
            params = (param for group in groups for param in group["params"])
            self._param = next((param for param in params if param.grad is not None), None)
        self._captured = self._captured or _capturing()
        self.seen = True
        self.since_sync += 1
        if self._after_optimizer < 2:
            self._ahead = self._repeats = 0
        self._after_optimizer = 0
        self._after_scheduler += 1
        if self._after_scheduler > 1:
            self._behind += 1
        if self._behind >= MOST_BEHIND and not (self._warned or self._captured):
            self._warned = True
            log.warning(
                "the optimizer made %d steps more than the scheduler, which counts total_steps and sync_every in its "
                "own: %s (in Lightning, interval='step'). A schedule that is meant to go by epochs may go on",
                *(self._behind, _ONCE),
            )

    def check(self, rank: int) -> None:
        """Raise RuntimeError if a scheduler step now is one too many.

        Either the gradient is still that of the last scheduler step, and no optimizer step came in between; or several
        optimizer steps in a row were followed by two scheduler steps or more.
        """
        if not self.counts or self._after_optimizer == 0:
            return
        remedy = (
            f"{_ONCE}. Accelerate steps a prepared scheduler once per process: use "
            "hdet_kernels.integrations.accelerate.prepare(). With gradient accumulation, step it with the optimizer"
        )
        last, now = self._gradient, self._present()
        if last is not None and now is not None and now is last[0]() and times_written(now) == last[1]:
            raise RuntimeError(
                f"rank {rank}: scheduler.step() was called {self._after_optimizer + 1} times after one "
                f"optimizer.step(), with no new gradient in between: {remedy}"
            )
        if self._repeats >= FEWEST_REPEATS and self._ahead >= MOST_AHEAD:
            raise RuntimeError(
                f"rank {rank}: scheduler.step() was called {self._repeats + self._ahead} times for the last "
                f"{self._repeats} steps of the optimizer: {remedy}"
            )

    def scheduler_stepped(self) -> None:
        """Count a step of the scheduler that was finished."""
        if not self.counts:
            return
        if self._after_scheduler < 2:
            self._behind = 0
        self._after_scheduler = 0
        self._after_optimizer += 1
        if self._after_optimizer > 1:
            self._ahead += 1
            self._repeats += self._after_optimizer == 2
        self._gradient = _trace(self._present())

    def _present(self) -> Tensor | None:
        """Return the gradient that the remembered parameter has now."""
        return None if self._param is None else self._param.grad

    def synced(self) -> None:
        self.since_sync = 0


def _trace(gradient: Tensor | None) -> tuple[TensorWeakRef, int] | None:
    """Return what tells whether a gradient is still the same: the object, and how often it was written in place."""
    if type(gradient) is not Tensor or gradient.is_inference():
        return None
    return TensorWeakRef(gradient), times_written(gradient)


class RivalSchedules:
    """Notices another schedule that writes the learning rates of the optimizer: what either writes is overwritten."""

    #: How often it is looked for who wrote. It takes as long as a collection of garbage.
    MOST_SEARCHES = 3

    def __init__(self) -> None:
        self._searches = 0
        self._wrote: list[object] | None = None

    def wrote(self, groups: Sequence[dict[str, Any]]) -> None:
        """Note that the scheduler has just written the learning rates of the groups."""
        self._wrote = [_mark(group["lr"]) for group in groups] if self._searches < self.MOST_SEARCHES else None

    def wrote_since(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether somebody else has written a learning rate since then."""
        return self._wrote is not None and [_mark(group["lr"]) for group in groups] != self._wrote

    def find(self, optimizer: Optimizer, *, own: object, told: bool) -> None:
        """Warn once of a torch scheduler that wrote the learning rates of now.

        Args:
            optimizer: the innermost one.
            own: the HDET scheduler, which may wrap others.
            told: whether this process warns.
        """
        self._searches, self._wrote = self._searches + 1, None
        rates = [group["lr"] for group in optimizer.param_groups]
        mine = {id(part) for part in _with_parts(own)}
        found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler) and id(each) not in mine]
        for name in (type(each).__name__ for each in found if _wrote(each, optimizer, rates)):
            self._searches = self.MOST_SEARCHES
            if told:
                log.warning(
                    "%s wrote the learning rates of the optimizer (%s), and %s writes them too: what one writes the "
                    "other overwrites. Step one scheduler alone: hk.HDETScheduler(base_scheduler) spreads the learning "
                    "rates of the %s that it wraps",
                    *(name, ", ".join(f"{float(rate):g}" for rate in rates), type(own).__name__, name),
                )
            return


def _mark(rate: float | Tensor) -> object:
    """Return what changes when a learning rate is written, without waiting for a device."""
    return (id(rate), times_written(rate)) if isinstance(rate, Tensor) else rate


def _with_parts(scheduler: object) -> Iterator[object]:
    """Yield a scheduler and those that it wraps."""
    yield scheduler
    for value in vars(scheduler).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, LRScheduler):
                yield from _with_parts(part)


def _wrote(scheduler: LRScheduler, optimizer: Optimizer, rates: list[Any]) -> bool:
    """Return whether a scheduler is one of these groups, and wrote these learning rates to them at its last step."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    same = len(groups) == len(rates) and all(map(is_, groups, optimizer.param_groups))
    try:
        return same and scheduler.get_last_lr() == rates
    except AttributeError:  # its constructor failed
        return False


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_REMEDY = (
    "call torch.distributed.init_process_group() before the first step, or pass "
    "ensemble=hdet_kernels.ensemble.SingleReplica() if every process is to train for itself"
)


class LateEnsemble:
    """The decision between one replica and a process group that is initialised later, as long as it is ``open``.

    ``given`` is ``ensemble=`` of the scheduler, ``found`` are the replicas that it was built with.
    """

    def __init__(self, given: Ensemble | None, found: Ensemble) -> None:
        self._single = given is None and found.size == 1
        self.open = self._single and not _initialised()

    @property
    def arrived(self) -> bool:
        return self.open and _several_processes()

    def check_arrived(self) -> None:
        """Raise RuntimeError if the processes of this run should have a group by now, and have none."""
        if self.open and not _initialised() and (size := announced_size()) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {size} in the environment, but no process group is initialised: each process would "
                f"train one replica for itself; {_REMEDY}"
            )

    def check_none_arrived(self) -> None:
        """Raise RuntimeError if a process group was initialised after the decision for one replica."""
        if self._single and not self.open and _several_processes():
            raise RuntimeError(
                f"a process group of {dist.get_world_size()} processes was initialised after the scheduler was first "
                f"used, as the only replica: {_REMEDY}"
            )


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _several_processes() -> bool:
    return _initialised() and dist.get_world_size() > 1
