"""Save and restore a cycle. ``docs/checkpoint-format.md`` lists the keys.

A state is first brought to the current format (``formats.py``) and checked as a whole (``checked_state.py``). Then
:func:`restore` applies it. If that fails after all, because a setter of the user raises, :func:`undone_on_error` brings
everything back.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hdet_kernels.schedule.attachment import untouched_on_error
from hdet_kernels.schedule.checkpoint.checked_state import holds_part, run_of
from hdet_kernels.schedule.checkpoint.formats import FORMAT
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import History
from hdet_kernels.schedule.losses import LossWindow
from hdet_kernels.schedule.sync import Overlapping
from hdet_kernels.version import __version__

log = logging.getLogger("hdet_kernels")


def state_of(cycle: Cycle) -> dict[str, Any]:
    """Return the state of a cycle in this process, as plain values and tensors that ``weights_only=True`` loads."""
    overlapping, run = cycle.overlapping, cycle.run
    return {
        "format": FORMAT,
        "version": __version__,
        "config": cycle.config,
        "size": cycle.ensemble.size,
        "replica": cycle.ensemble.replica,
        "rows": cycle.ensemble.rows,
        "part": [cycle.ensemble.part, cycle.ensemble.parts],
        "step": cycle.step,
        "averaged": cycle.in_sync,
        "optimizer_state": cycle.expects_state or any(cycle.optimizer.state.values()),
        "run": {"peak": run.peak, "peaks": list(run.peaks), "end": run.end},
        "shared": cycle.shared,
        "spread": cycle.spread.state_dict(),
        # The run that goes on from the average has no losses of its own yet.
        "window": LossWindow.emptied(cycle.window.state_dict()) if cycle.in_consensus else cycle.window.state_dict(),
        "displacement": cycle.displacement.state_dict() if cycle.displacement else None,
        "pending": overlapping and overlapping.state_dict(in_consensus=cycle.in_consensus),
        "compression": cycle.converger.state_dict(),
        "outer": cycle.converger.outer_state_dict(),
        "begun": cycle.started,
        "history": [record.to_dict() for record in cycle.history.records],
        "summary": cycle.history.summary.to_dict(),
        "undo": cycle.undoing and cycle.undoing.state_dict(),
    }


def restore(cycle: Cycle, state: dict[str, Any]) -> None:
    """Bring ``cycle`` to a state that was checked, at this replica's own place in the spread."""
    ensemble = cycle.ensemble
    same_replicas = (state["replica"], state["size"]) == (ensemble.replica, ensemble.size)
    same_part = holds_part(cycle, state)
    own = same_replicas and same_part
    if not same_replicas and not state["averaged"]:
        log.warning(
            "the checkpoint was saved by replica %d at step %d, when the replicas differed, and replica %d resumes "
            "from it: the parameters are not the average of all replicas, and training goes on from other ones than "
            "it had. Save where scheduler.in_sync is True or inside scheduler.consensus(), or have every rank save "
            "and load a file of its own",
            *(state["replica"], cycle.before + state["step"], ensemble.replica),
        )
    cycle.run = run_of(cycle, state)
    cycle.step = state["step"]
    cycle.shared = state["shared"]
    cycle.spread.load_state_dict(state["spread"], cycle.optimizer.param_groups)
    same_count = (state["size"], state["rows"]) == (ensemble.size, ensemble.rows)
    cycle.window.load_state_dict(state["window"] if same_count else LossWindow.emptied(state["window"]))
    if cycle.displacement is not None:
        cycle.displacement.load_state_dict(state["displacement"] if same_part else None)
    if cycle.overlapping is not None:
        _ = cycle.overlapping.average.failed  # waits for it, so that it cannot write to what is loaded now
    cycle.overlapping = None if state["pending"] is None else Overlapping.of(state["pending"])
    cycle.converger.load_state_dict(state["compression"] if same_part else None, own=own)
    cycle.converger.load_outer_state_dict(state["outer"])
    if cycle.undoing is not None:
        cycle.undoing.load_state_dict(state["undo"], own=own)
    cycle.started, cycle.averaged = state["begun"], state["averaged"]
    cycle.expects_state = state["optimizer_state"]
    cycle.history = History.of(state["history"], state["summary"])
    if cycle.history_file is not None:
        cycle.history_file.reopen()
    cycle.fan_out()
    cycle.write()
    cycle.publish()


@contextlib.contextmanager
def undone_on_error(cycle: Cycle, *others: object) -> Iterator[None]:
    """Bring the cycle, the optimizer's groups and ``others`` back to what they were if the block raises."""
    undoing = cycle.undoing
    parts = [cycle, cycle.spread, cycle.window, cycle.displacement, *cycle.converger.memories(), *others]
    parts += [undoing, undoing.last_sound, undoing.last_sound.copy] if undoing else []
    before = [(part, dict(vars(part))) for part in parts if part is not None]
    with untouched_on_error(cycle.optimizer):
        try:
            yield
        except BaseException:
            for part, entries in before:
                vars(part).clear()
                vars(part).update(entries)
            with contextlib.suppress(Exception):  # a setter that raised may raise again
                cycle.write()
            raise


@contextlib.contextmanager
def schedule_loaded(scheduler: LRScheduler, state: dict[str, Any]) -> Iterator[None]:
    """Load a wrapped scheduler; if it raises, or the block does, it is as before."""
    before = copy.deepcopy(scheduler.state_dict())
    try:
        try:
            scheduler.load_state_dict(copy.deepcopy(state))
        except Exception as error:  # a scheduler of the user may raise anything
            raise ValueError(
                f"{type(scheduler).__name__} refuses the checkpoint's base_scheduler ({error!r}): load an undamaged "
                "checkpoint"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise
