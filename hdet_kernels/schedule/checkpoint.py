"""Save a run as plain values and tensors, check what was saved, and restore it.

The dataclasses below are the file: every field is a key, and its type says what may stand there. A field with a default
may be missing. :func:`from_plain` reads them from a state dict and raises a ValueError that names the first entry that
is not as expected; :func:`to_plain` turns them back. :func:`checked` then compares a state with the scheduler that
loads it: its settings, lengths and shapes. Nothing is modified before all of that has passed. :func:`restore` applies
it; if that fails after all, because a setter of the user raises, :func:`undone_on_error` brings everything back.
``docs/checkpoint-format.md`` explains every key.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet_kernels.controller.hypergradient import HypergradientController
from hdet_kernels.controller.protocol import Run
from hdet_kernels.controller.regression import GRID_POINTS, RegressionController
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.schedule.attachment import untouched_on_error
from hdet_kernels.schedule.cycle import Cycle, Overlapping
from hdet_kernels.schedule.gradients import SLOPE_STEPS
from hdet_kernels.schedule.history import WINDOW, History, SyncRecord
from hdet_kernels.schedule.losses import AnyNumber, LossWindow
from hdet_kernels.schedule.scout.phase import Scouted, Scouting
from hdet_kernels.schedule.undo.copies import state_pairs
from hdet_kernels.schedule.undo.undoing import LastSound
from hdet_kernels.version import __version__

log = logging.getLogger("hdet_kernels")

#: Raised when a key changes its name or its meaning. Format 3 is that of the first files of version 0.2.0.
FORMAT = 4

Kind = TypeVar("Kind")
_DAMAGED = "load an undamaged checkpoint"
_OTHER_MODEL = "resume with the model that it was saved with"


# What is in a file


@dataclass(frozen=True)
class Within:
    """The range of a number."""

    lowest: float
    highest: float = math.inf


Positive = Annotated[int, Within(1, 2**31)]
Share = Annotated[float, Within(0, 1)]
NotNegative = Annotated[float, Within(0)]
Part = tuple[int, Positive]  # number of a part of a replica, and how many there are
Rate = Tensor | NotNegative


@dataclass(frozen=True)
class RunFacts:
    peak: Share
    peaks: list[NotNegative | None]
    end: Share


@dataclass(frozen=True)
class SpreadState:
    scheduled: list[Rate]
    controller: dict[str, Any]  # one of the classes below, or that of a controller from outside


@dataclass(frozen=True)
class SoftmaxState:
    eta: list[NotNegative]
    velocity: list[float]
    gamma: list[Annotated[float, Within(-math.inf, 1)]]


@dataclass(frozen=True)
class SlopeState:
    mu: list[float]
    m: list[float]
    q: list[NotNegative]
    s: list[NotNegative]
    observations: list[int]
    updates: list[int]
    caps: list[NotNegative | None]


@dataclass(frozen=True)
class SoundnessState:
    initial: float
    lowest: float
    last: float
    changes: list[NotNegative]
    costs: list[AnyNumber]


@dataclass(frozen=True)
class RegressionState(SlopeState):
    log_likelihood: list[list[float]]
    path_length: list[NotNegative]
    ceiling: list[float | None]
    signs: list[Annotated[float, Within(-1, 1)]]
    noise: tuple[NotNegative, NotNegative]
    soundness: SoundnessState | None


@dataclass(frozen=True)
class WindowState:
    sum: list[AnyNumber] | AnyNumber
    count: Annotated[float, Within(0, 2**63 - 1)]
    ever: bool


@dataclass(frozen=True)
class DisplacementState:
    last: list[list[Tensor]]
    moved: list[list[Tensor]] | None
    slopes: list[list[AnyNumber]]
    apart: bool


@dataclass(frozen=True)
class PlacementState:
    base: list[float]
    values: list[list[float]]
    applied: list[list[float]]


@dataclass(frozen=True)
class CorrectionState:
    sound: list[bool]
    heal: bool
    has_state: bool
    params: list[Tensor]
    buffers: list[Tensor]
    buffers_before: list[Tensor]
    state: dict[str, Tensor]
    state_before: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None


@dataclass(frozen=True)
class OutcomeState:
    losses: list[AnyNumber]
    probes: list[AnyNumber]
    healthy: list[bool]
    shared: bool | None
    bytes: int
    collectives: int
    seconds: NotNegative
    kept: int | None
    distance: NotNegative | None = None


@dataclass(frozen=True)
class PendingState:
    step: int
    due: int
    placed: PlacementState
    acting: bool
    correction: CorrectionState
    outcome: OutcomeState


@dataclass(frozen=True)
class CompressionState:
    format: Literal["bf16", "int8"]
    processes: Positive
    consensus: list[Tensor]
    error: list[Tensor]
    shard_error: list[Tensor]


@dataclass(frozen=True)
class OuterState:
    consensus: list[Tensor]
    velocity: list[Tensor] | None
    start: list[AnyNumber] | None
    part: Part


@dataclass(frozen=True)
class KeptState:
    step: int
    level: float | None
    part: Part
    rows: int
    params: list[Tensor]
    buffers: list[Tensor]
    state: dict[str, Tensor] | None
    others: dict[str, Any] | None
    compression: CompressionState | None
    outer: OuterState | None


@dataclass(frozen=True)
class UndoState:
    returns: int
    kept: KeptState | None


@dataclass(frozen=True)
class Point:
    step: int
    loss: float | None
    base: dict[str, float]


@dataclass(frozen=True)
class SummaryState:
    syncs: int
    collectives: int
    bytes: int
    seconds: NotNegative
    excluded: int
    undone: int
    base: dict[str, dict[str, float]]  # first, lowest, highest and last, by name of the hyperparameter
    loss: dict[str, float]  # the same; empty before the first loss
    every: Positive
    points: list[Point]


@dataclass(frozen=True)
class CycleState:
    """The entry ``"hdet"`` of a scheduler's state."""

    format: int
    version: str
    config: dict[str, Any]
    size: Positive
    replica: int
    rows: Positive
    part: Part
    step: int
    averaged: bool
    optimizer_state: bool
    run: RunFacts
    shared: bool | None
    spread: SpreadState
    window: WindowState
    displacement: DisplacementState | None
    pending: PendingState | None
    compression: CompressionState | None
    outer: OuterState | None
    begun: bool
    history: list[SyncRecord]
    summary: SummaryState
    undo: UndoState | None


@dataclass(frozen=True)
class RoundState:
    ever: bool
    first: WindowState
    tail: WindowState
    squares: WindowState


@dataclass(frozen=True)
class PhaseState:
    replicas: tuple[int, int, int, int]
    round: int
    step: int
    bracket: tuple[float, float]
    losses: RoundState
    probed: list[AnyNumber] | AnyNumber
    certain: bool
    shared_state: bool
    fresh: bool
    start: KeptState | None
    consensus: bool = False


@dataclass(frozen=True)
class ScoutState:
    """The entry ``"scout"`` of the state of a scheduler with ``max_lr=None``."""

    config: dict[str, Any]
    ratios: list[NotNegative]
    found: NotNegative | None
    phase: PhaseState | None


# Plain values to dataclasses, and back


def to_plain(value: Any) -> Any:
    """Return a dataclass as nested dicts and lists; its tensors are not copied."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """Return ``value`` as the type ``kind`` says; dataclasses are read from dicts.

    Numbers are finite, and whole numbers are from 0 to 2^63 − 1, unless :class:`Within` says otherwise.

    Raises:
        ValueError: naming the path of the first entry that is not as expected.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _number(arguments[0], value, path, arguments[1])
    if origin in (Union, UnionType):
        return _one_of(arguments, value, path)
    if dataclasses.is_dataclass(kind):
        return _fields(kind, value, path)
    if origin is dict:
        named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        expect(named, path, "a dict with names as keys", value)
        return {name: from_plain(arguments[1], entry, f"{path}.{name}") for name, entry in value.items()}
    if origin in (list, tuple):
        expect(isinstance(value, list | tuple), path, "a list", value)
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(value)
        expect(len(kinds) == len(value), path, f"a list of {len(kinds)} entries", value)
        return origin(
            from_plain(k, entry, f"{path}[{n}]") for n, (k, entry) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is Literal:
        expect(isinstance(value, str) and value in arguments, path, f"one of {', '.join(arguments)}", value)
    elif kind is Tensor:
        expect(isinstance(value, Tensor) and not value.is_meta, path, "a tensor", value)
    elif kind in (int, float):
        return _number(kind, value, path, Within(0, 2**63 - 1) if kind is int else Within(-math.inf))
    else:
        expect(isinstance(value, kind), path, {bool: "True or False", str: "a string"}.get(kind, "None"), value)
    return value


def _number(kind: type, value: Any, path: str, within: Within | None) -> Any:
    number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if within is None:  # a loss, which may be NaN
        expect(number, path, "a number", value)
        return value
    name, ends = "a whole number" if kind is int else "a finite number", [within.lowest, within.highest]
    bounds = "" if not any(map(math.isfinite, ends)) else f" from {ends[0]:g} to {ends[1]:g}"
    fine = number and math.isfinite(value) and within.lowest <= value <= within.highest
    expect(fine, path, name + bounds, value)
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Return ``value`` as one of several types: None, or the last one that may fit, whose error is the best."""
    if value is None and type(None) in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with contextlib.suppress(ValueError):
            return from_plain(kind, value, path)
    return from_plain(last, value, path)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fields(kind: Any, value: Any, path: str) -> Any:
    expect(isinstance(value, dict), path, "a dict", value)
    hints = _hints(kind)
    needed = [field.name for field in dataclasses.fields(kind) if _is_needed(field)]
    if missing := [f"{path}.{name}" for name in needed if name not in value]:
        raise ValueError(f"the checkpoint has no {', '.join(missing)}: {_DAMAGED}")
    if unknown := [f"{path}.{name}" for name in value if name not in hints]:
        raise ValueError(
            f"the checkpoint has entries that hdet_kernels {__version__} does not know: {', '.join(unknown)}: load it "
            "with the version that saved it"
        )
    return kind(**{name: from_plain(hints[name], entry, f"{path}.{name}") for name, entry in value.items()})


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def expect(fine: bool, path: str, expected: str, value: object) -> None:
    """Raise ValueError, which names ``path``, the value and what was expected, unless it is ``fine``."""
    if fine:
        return
    if isinstance(value, Tensor):
        shown = f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    elif isinstance(value, list | tuple | dict):
        shown = f"a {type(value).__name__} of {len(value)} entries"
    else:
        shown = repr(value)[:80]
    raise ValueError(f"the checkpoint's {path} must be {expected}, got {shown}: {_DAMAGED}")


def packed(state: dict[str, Any]) -> tuple[dict[str, Any]]:
    """Return ``state`` as one object that ``torch.distributed.checkpoint`` (DCP) saves and loads whole.

    DCP takes dicts and lists apart, drops empty dicts, and loads only into entries that the scheduler which loads has
    already; history and state of a controller grow during a run. A tuple it takes as one object. Its tensors are on the
    CPU, because DCP brings them back to the device that they were saved on, which another machine may not have.
    """
    return (_on_cpu(state),)


def unpacked(entry: object) -> object:
    """Return what :func:`packed` was given. Anything else is returned as it is: format 3 did not pack it."""
    return entry[0] if isinstance(entry, tuple | list) and len(entry) == 1 else entry


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(entry) for entry in value)
    return value


# Saving and restoring a cycle


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


def restore(cycle: Cycle, saved: CycleState) -> None:
    """Bring ``cycle`` to a state that was checked, at this replica's own place in the spread."""
    ensemble = cycle.ensemble
    same_replicas = (saved.replica, saved.size) == (ensemble.replica, ensemble.size)
    same_part = _holds_part(cycle, saved)
    own = same_replicas and same_part
    if not same_replicas and not saved.averaged:
        log.warning(
            "the checkpoint was saved by replica %d at step %d, when the replicas differed, and replica %d resumes "
            "from it: the parameters are not the average of all replicas, and training goes on from other ones than "
            "it had. Save where scheduler.in_sync is True or inside scheduler.consensus(), or have every rank save "
            "and load a file of its own",
            *(saved.replica, cycle.before + saved.step, ensemble.replica),
        )
    cycle.run = _run_of(cycle, saved)
    cycle.step, cycle.shared = saved.step, saved.shared
    cycle.spread.load_state_dict(to_plain(saved.spread), cycle.optimizer.param_groups)
    window = to_plain(saved.window)
    same_count = (saved.size, saved.rows) == (ensemble.size, ensemble.rows)
    cycle.window.load_state_dict(window if same_count else LossWindow.emptied(window))
    if cycle.displacement is not None:
        cycle.displacement.load_state_dict(to_plain(saved.displacement) if same_part else None)
    if cycle.overlapping is not None:
        _ = cycle.overlapping.average.failed  # waits for it, so that it cannot write to what is loaded now
    cycle.overlapping = None if saved.pending is None else Overlapping.of(to_plain(saved.pending))
    cycle.converger.load_state_dict(to_plain(saved.compression) if same_part else None, own=own)
    cycle.converger.load_outer_state_dict(to_plain(saved.outer))
    if cycle.undoing is not None:
        cycle.undoing.load_state_dict(to_plain(saved.undo), own=own)
    cycle.started, cycle.averaged = saved.begun, saved.averaged
    cycle.expects_state = saved.optimizer_state
    cycle.history = History.of(to_plain(saved.history), to_plain(saved.summary))
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
                f"{type(scheduler).__name__} refuses the checkpoint's base_scheduler ({error!r}): {_DAMAGED}"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


# Checking a state against the scheduler that loads it


def checked(cycle: Cycle, state_dict: object) -> CycleState:
    """Return the cycle's part of a scheduler's state, which :func:`restore` can take.

    Raises:
        ValueError: naming the entry that is missing, unknown, damaged or of another run; nothing is modified.
    """
    own = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    if not isinstance(own, dict) or "config" not in own:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    plain = _of_this_format(cycle, own)
    _check_config(plain["config"], cycle.config)
    saved: CycleState = from_plain(CycleState, plain, "hdet")
    step, run = saved.step, cycle.run
    expect(run.total_steps is None or step <= run.total_steps, "hdet.step", f"at most {run.total_steps}", step)
    _check_replicas(cycle, saved)
    _check_facts(cycle, saved)
    _check_history(cycle, saved)
    if saved.displacement is not None:
        _check_displacement(cycle, saved.displacement, own_part=_holds_part(cycle, saved))
    if saved.pending is not None:
        _check_pending(cycle, saved, saved.pending)
    _check_converger(cycle, saved)
    _check_controller(cycle, saved)
    return saved


def config_of(state_dict: object) -> dict[str, Any]:
    """Return the settings in a scheduler's state; empty if it is damaged."""
    hdet = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    config = hdet.get("config") if isinstance(hdet, dict) else None
    return config if isinstance(config, dict) else {}


def _of_this_format(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of format 3 or 4 in format 4; raise ValueError for another format."""
    if "format" not in state and "version" in state:
        raise ValueError(f"the checkpoint has no hdet.format: {_DAMAGED}")
    saved = state.get("format", 1)
    if isinstance(saved, bool) or not isinstance(saved, int) or saved not in (3, FORMAT):
        unknown = ", ".join(f"hdet.{name}" for name in state if name not in _hints(CycleState))
        raise ValueError(
            f"the checkpoint has format {saved!r:.40} of hdet_kernels {state.get('version', 'before 0.2.0')!r:.40}, "
            f"this is version {__version__}, which reads 3 and {FORMAT}"
            f"{f' and does not know {unknown}' if unknown else ''}: load it with the version that saved it"
        )
    if saved == FORMAT:
        return state
    step, run = state.get("step"), cycle.run
    at_a_sync = isinstance(step, int) and (step % run.sync_every == 0 or step == run.total_steps)
    if isinstance(moved := state.get("displacement"), dict) and "slopes" not in moved:
        state = {**state, "displacement": _with_slopes(moved)}
    return {
        **state,
        "format": FORMAT,
        "part": [cycle.ensemble.part, cycle.ensemble.parts],
        "averaged": at_a_sync and state.get("pending") is None,
        "optimizer_state": False,  # not known
    }


def _with_slopes(displacement: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a displacement that had sums of slopes and of their squares, by group.

    The slopes of each gradient are not known any more. Others with the same mean and the same error stand for them.
    """
    others = {key: value for key, value in displacement.items() if key not in ("sums", "count")}
    sums, count = displacement.get("sums"), displacement.get("count")
    if sums is None and count == 0:
        return {**others, "slopes": []}
    try:
        by_group = [_spread_out(total, squares, int(count or 0)) for total, squares in zip(*(sums or ()), strict=True)]
        return {**others, "slopes": [list(slopes) for slopes in zip(*by_group, strict=True)]}
    except (TypeError, ValueError, ZeroDivisionError):
        return displacement  # damaged, which from_plain names


def _spread_out(total: float, squares: float, count: int) -> list[float]:
    """Return ``count`` numbers with this sum and this sum of squares."""
    mean = total / count
    apart = math.sqrt(max(squares - total * mean, 0.0) / (count // 2 * 2)) if count > 1 else 0.0
    return [mean] * (count % 2) + [mean - apart, mean + apart] * (count // 2)


def _check_config(saved: object, here: object, name: str = "") -> None:
    """Raise ValueError for the first setting in which two nested dicts differ."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in dict.fromkeys((*here, *saved)):
            _check_config(saved.get(key, "nothing"), here.get(key, "nothing"), f"{name}.{key}" if name else str(key))
    elif not name or not _equal(saved, here):
        expect(bool(name), "hdet.config", "a dict", saved)
        raise ValueError(
            f"the checkpoint was made with {name}={saved!r:.300}, this scheduler has {here!r:.300}: build it with the "
            "arguments of the saved run"
        )


def _equal(saved: object, here: object) -> bool:
    """Return whether two plain values are equal; a bool equals no number."""
    try:
        return isinstance(saved, bool) is isinstance(here, bool) and bool(saved == here)
    except Exception:  # values of other kinds, such as tensors, may not have a truth value
        return False


def _holds_part(cycle: Cycle, saved: CycleState) -> bool:
    """Return whether this process holds the part of its replica that the process which saved the state held."""
    return saved.part == (cycle.ensemble.part, cycle.ensemble.parts)


def _check_replicas(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError if a state of another number of replicas cannot be divided among those here."""
    there, here = (saved.size, saved.rows), (cycle.ensemble.size, cycle.ensemble.rows)
    expect(saved.replica < saved.size, "hdet.replica", f"below size={saved.size}", saved.replica)
    divides = not (saved.size % saved.rows or saved.replica % saved.rows)
    expect(divides, "hdet.rows", f"a divisor of size={saved.size} and of replica={saved.replica}", saved.rows)
    if saved.pending is not None and not _holds_part(cycle, saved):
        raise ValueError(
            f"the checkpoint has part {saved.part[0]} of {saved.part[1]} of a replica and an overlapped average "
            f"under way, this process holds part {cycle.ensemble.part} of {cycle.ensemble.parts}: load the file of a "
            "process that held the same part, or call scheduler.converge() before saving, which applies the average"
        )
    if there == here:
        return
    into_cycle = saved.step % cycle.run.sync_every
    several = max(there[1], here[1]) > 1
    of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (there, here))
    counts = f"the checkpoint has {there[0]} replicas{of_saved}", f"this run has {here[0]}{of_here.rstrip(',')}"
    if into_cycle and saved.step != cycle.run.total_steps and not saved.averaged:
        raise ValueError(
            f"{counts[0]} and was saved {into_cycle} steps into a cycle, {counts[1]}: another number of replicas"
            f"{' in a process' if there[0] == here[0] else ''} can resume only where all are equal, at a multiple "
            f"of sync_every={cycle.run.sync_every}; save there, or inside scheduler.consensus()"
        )
    if saved.pending is not None and there[1] != here[1]:
        raise ValueError(
            f"{counts[0]} and an overlapped average under way, {counts[1]}: its corrections are those of the saved "
            "replicas; call scheduler.converge() before saving, which applies it"
        )


def _check_facts(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless lists have an entry for each hyperparameter, parameter group or replica."""
    _check_length("hdet.run.peaks", saved.run.peaks, len(cycle.run.peaks))
    _check_length("hdet.spread.scheduled", saved.spread.scheduled, len(cycle.optimizer.param_groups))
    for number, rate in enumerate(saved.spread.scheduled):
        if isinstance(rate, Tensor):
            _check_tensor(f"hdet.spread.scheduled[{number}]", rate, None if rate.numel() == 1 else ())
    _check_by_row("hdet.window.sum", saved.window.sum, saved.rows, known=saved.window.count > 0)


def _check_by_row(path: str, value: float | list[float], rows: int, *, known: bool) -> None:
    """Raise ValueError unless there is a number, or one for each of several rows; an unknown one fits both."""
    several = isinstance(value, list)
    fine = several is (rows > 1) if known else rows > 1 or not several
    if isinstance(value, list):
        fine = fine and len(value) == rows
    expect(fine, path, f"{rows} numbers" if rows > 1 else "a number", value)


def _check_length(path: str, value: Sequence[Any], *lengths: int) -> None:
    expect(len(value) in lengths, path, f"a list of {' or '.join(map(str, lengths))} entries", value)


def _check_tensor(
    path: str, value: Tensor, shape: tuple[int, ...] | None, *, finite: bool = True, integers: bool = False
) -> None:
    """Raise ValueError unless a tensor has this shape (None: any), floating-point numbers or integers, and no NaN."""
    kind = f"a{'n integer' if integers else ' floating-point'} tensor"
    expect(value.is_floating_point() is not integers, path, kind, value)
    if shape is not None:
        expect(tuple(value.shape) == shape, path, f"a tensor of shape {shape}", value)
    if finite and not integers and not bool(value.isfinite().all()):
        raise ValueError(f"the checkpoint's {path} has values that are not finite: {_DAMAGED}")


def _check_history(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless there are as many records and points as belong to the number of syncs."""
    step, names = cycle.before + saved.step, {hyper.name for hyper in cycle.spread.hyperparameters}
    for number, record in enumerate(saved.history):
        path = f"hdet.history[{number}]"
        expect(record.step <= step, f"{path}.step", f"at most {step}", record.step)
        for name, found in (("base", record.base), ("values", record.values)):
            expect(found.keys() == names, f"{path}.{name}", f"a dict of {', '.join(names)}", ", ".join(found))
        for name, values in (record.posterior or {}).items():
            _check_length(f"{path}.posterior.{name}", values, 2)
    summary = saved.summary
    expect(not summary.base or summary.base.keys() == names, "hdet.summary.base", ", ".join(names), summary.base)
    for name, extremes in {**summary.base, "loss": summary.loss}.items():
        known = not extremes or extremes.keys() == {"first", "lowest", "highest", "last"}
        expect(known, f"hdet.summary ({name})", "first, lowest, highest and last", ", ".join(extremes))
    for number, point in enumerate(summary.points):
        path = f"hdet.summary.points[{number}].base"
        expect(point.base.keys() == names, path, f"a dict of {', '.join(names)}", point.base)
    for name, count, expected in (
        ("history", len(saved.history), min(summary.syncs, WINDOW)),
        ("summary.points", len(summary.points), -(-summary.syncs // summary.every)),
    ):
        if count != expected:
            raise ValueError(
                f"the checkpoint's hdet.{name} has {count} entries, {expected} belong to {summary.syncs} syncs: "
                f"{_DAMAGED}"
            )


def _check_displacement(cycle: Cycle, saved: DisplacementState, *, own_part: bool) -> None:
    """Raise ValueError unless it is one of this model. A run that measures none, or another part, leaves it out."""
    rates = len(set(cycle.spread.rate_of.values()))
    expect(len(saved.slopes) <= SLOPE_STEPS, "hdet.displacement.slopes", f"at most {SLOPE_STEPS} lists", saved.slopes)
    for number, slopes in enumerate(saved.slopes):
        _check_length(f"hdet.displacement.slopes[{number}]", slopes, rates)
    for name, groups in (("last", saved.last), ("moved", saved.moved)):
        path = f"hdet.displacement.{name}"
        if groups is None:
            continue
        _check_length(path, groups, len(cycle.optimizer.param_groups))
        if cycle.displacement is None or not own_part or (name == "last" and not any(groups)):
            continue
        for number, (tensors, shapes) in enumerate(zip(groups, cycle.displacement.shapes, strict=True)):
            _check_tensors(f"{path}[{number}]", tensors, shapes)


def _check_tensors(path: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], **kind: bool) -> None:
    _check_length(path, tensors, len(shapes))
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        _check_tensor(f"{path}[{number}]", tensor, shape, **kind)


def _check_pending(cycle: Cycle, saved: CycleState, pending: PendingState) -> None:
    """Raise ValueError unless an average under way is one of this model and of the saved replicas."""
    step, path, count = saved.step, "hdet.pending", len(cycle.spread.hyperparameters)
    span = cycle.run.sync_every
    expect(step - span <= pending.step <= step, f"{path}.step", f"from {max(step - span, 0)} to {step}", pending.step)
    expect(step < pending.due <= step + span, f"{path}.due", f"from {step + 1} to {step + span}", pending.due)
    _check_length(f"{path}.placed.base", pending.placed.base, count)
    for name, by_replica in (("values", pending.placed.values), ("applied", pending.placed.applied)):
        _check_length(f"{path}.placed.{name}", by_replica, count)
        for number, values in enumerate(by_replica):
            _check_length(f"{path}.placed.{name}[{number}]", values, saved.size)
    outcome, correction = pending.outcome, pending.correction
    for name, each in (("losses", outcome.losses), ("probes", outcome.probes), ("healthy", outcome.healthy)):
        _check_length(f"{path}.outcome.{name}", each, saved.size)
    expect((outcome.kept or 0) <= step, f"{path}.outcome.kept", f"at most {step}", outcome.kept)
    path = f"{path}.correction"
    _check_length(f"{path}.sound", correction.sound, saved.rows)
    payload = cycle.converger.tensors.payload(include_state=True, reads=True, bucket_bytes=cycle.converger.bucket_bytes)
    _check_tensors(f"{path}.params", correction.params, [tuple(t.shape) for t in payload.outlines])
    buffers = [tuple(t.shape) for t in payload.buffers]
    _check_tensors(f"{path}.buffers", correction.buffers, buffers, finite=False)
    _check_tensors(f"{path}.buffers_before", correction.buffers_before, buffers, finite=False)
    _check_tensors(f"{path}.integers", correction.integers, [tuple(t.shape) for t in payload.integers], integers=True)
    if correction.counts is not None:
        _check_tensor(f"{path}.counts", correction.counts, (correction.counts.numel(),))
    here = {name: t.shape for name, t in payload.state.items()}
    for name in correction.state.keys() | correction.state_before.keys():
        both = [each.get(name) for each in (correction.state, correction.state_before)]
        shapes = [None if tensor is None else tensor.shape for tensor in both]
        floating = all(tensor is not None and tensor.is_floating_point() for tensor in both)
        if not floating or shapes[0] != shapes[1] or here.get(name, shapes[0]) != shapes[0]:
            raise ValueError(
                f"the checkpoint's {path}.state.{name} and state_before.{name} have shapes {shapes[0]} and "
                f"{shapes[1]}, the optimizer's state {here.get(name, 'none yet')}: load an undamaged checkpoint of "
                "this model"
            )


def _check_converger(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless what averages remember, and the copy that replicas return to, are of this model."""
    if saved.compression is not None:
        _check_compression(cycle, saved.compression, "hdet.compression", own_part=_holds_part(cycle, saved))
    if saved.outer is not None:
        expect(cycle.config["outer"] is not None, "hdet.outer", "None (outer=None here)", to_plain(saved.outer))
        _check_outer(saved.outer, "hdet.outer", saved.rows)
    if _holds_part(cycle, saved):
        cycle.converger.check_state_dict(to_plain(saved.compression))
    cycle.converger.check_outer_state_dict(to_plain(saved.outer))
    if saved.undo is not None:
        undoes = cycle.undoing is not None
        expect(undoes, "hdet.undo", "None (the controller undoes nothing here)", to_plain(saved.undo))
    if cycle.undoing is not None and saved.undo is not None and saved.undo.kept is not None:
        _check_kept(cycle, saved.undo.kept, "hdet.undo.kept", saved.rows, saved.step)
        cycle.undoing.last_sound.check_state_dict(to_plain(saved.undo.kept))


def _check_compression(cycle: Cycle, saved: CompressionState, path: str, *, own_part: bool) -> None:
    """Raise ValueError unless the memory of the compression has the elements of one replica here."""
    for name, tensors in (("consensus", saved.consensus), ("error", saved.error), ("shard_error", saved.shard_error)):
        # The size comes first: a tensor of one element can claim to be as large as memory allows.
        for number, tensor in enumerate(tensors):
            _check_tensor(f"{path}.{name}[{number}]", tensor, (tensor.numel(),), finite=False)
        if cycle.converger.compress and own_part and name != "shard_error":
            at_once = cycle.converger.bucket_bytes
            payload = cycle.converger.tensors.payload(include_state=False, reads=True, bucket_bytes=at_once)
            compressed = (tensor for tensor in payload.outlines if tensor.dtype != torch.float64)
            here = sum(map(Tensor.numel, compressed)) // cycle.ensemble.rows
            if (found := sum(tensor.numel() for tensor in tensors)) != here:
                raise ValueError(
                    f"the checkpoint's {path}.{name} has {found} elements, this model has {here}: {_OTHER_MODEL}"
                )
        for number, tensor in enumerate(tensors):
            _check_tensor(f"{path}.{name}[{number}]", tensor, None)


def _check_outer(saved: OuterState, path: str, rows: int) -> None:
    """Raise ValueError unless these are flat tensors; ``OuterStep.check_state_dict`` compares their sizes."""
    for name, tensors in (("consensus", saved.consensus), ("velocity", saved.velocity or ())):
        _check_tensors(f"{path}.{name}", tensors, [(tensor.numel(),) for tensor in tensors])
    if saved.start is not None:
        _check_length(f"{path}.start", saved.start, 1, rows)


def _check_kept(cycle: Cycle, saved: KeptState, path: str, rows: int, step: int) -> None:
    """Raise ValueError unless this is a copy of ``rows`` replicas; ``LastSound.check_state_dict`` compares shapes."""
    expect(saved.step <= step, f"{path}.step", f"at most {step}", saved.step)
    expect(saved.rows == rows, f"{path}.rows", str(rows), saved.rows)
    _check_tensors(f"{path}.params", saved.params, [tuple(t.shape) for t in saved.params], finite=False)
    if saved.compression is not None:
        _check_compression(cycle, saved.compression, f"{path}.compression", own_part=False)
    if saved.outer is not None:
        _check_outer(saved.outer, f"{path}.outer", rows)


def _check_controller(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless the controller's state fits it and gives every hyperparameter a base value."""
    controller, own, path = cycle.spread.controller, saved.spread.controller, "hdet.spread.controller"
    if controller is None:
        expect(not own, path, "an empty dict", own)
        return
    count = len(cycle.spread.hyperparameters)
    if type(controller) is SoftmaxController:
        _check_by_scalar(from_plain(SoftmaxState, own, path), path, count, may_be_empty=("eta", "gamma"))
    elif type(controller) is HypergradientController:
        _check_by_scalar(from_plain(SlopeState, own, path), path, count, limit=controller.limit)
    elif type(controller) is RegressionController:
        state: RegressionState = from_plain(RegressionState, own, path)
        _check_by_scalar(state, path, count, limit=controller.limit)
        for number, table in enumerate(state.log_likelihood):
            _check_length(f"{path}.log_likelihood[{number}]", table, 0, GRID_POINTS)
    else:
        check_like(own, controller.start(count, cycle.run), path)
    for index, hyper in enumerate(cycle.spread.hyperparameters):
        scheduled = saved.spread.scheduled[hyper.groups[0]] if hyper.base is None else hyper.base
        try:
            value = controller.base(copy.deepcopy(own), index, scheduled)
            fine, why = math.isfinite(value) and float(value) >= 0, f"not {value}"
        except Exception as error:  # a controller may raise anything
            fine, why = False, repr(error)
        expect(fine, path, f"one that gives {hyper.name} a value ({why})", own)
    try:
        _run_of(cycle, saved)
    except Exception as error:
        expect(False, "hdet.run", f"one that {type(controller).__name__} can work in ({error})", to_plain(saved.run))


def _check_by_scalar(
    state: Any, path: str, count: int, *, may_be_empty: Sequence[str] = ("caps",), limit: float = math.inf
) -> None:
    """Raise ValueError unless lists have an entry for each hyperparameter, and factors are within the limit."""
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, list):
            _check_length(f"{path}.{field.name}", value, count, *((0,) if field.name in may_be_empty else ()))
            if field.name in ("mu", "ceiling"):
                within = all(each is None or abs(each) <= limit for each in value)
                expect(within, f"{path}.{field.name}", f"within ±{limit:g}", value)


def _run_of(cycle: Cycle, saved: CycleState) -> Run:
    """Return the run as the controller prepared it in the saved run.

    A schedule that is built on an optimizer that was loaded before begins somewhere else and may look otherwise.
    """
    facts: dict[str, Any] = {"peak": saved.run.peak, "peaks": tuple(saved.run.peaks), "end": saved.run.end}
    if all(getattr(cycle.run, name) == value for name, value in facts.items()) or cycle.spread.controller is None:
        return cycle.run
    before = dataclasses.replace(cycle.run, **facts, early=(), in_pairs=False, departs=())
    prepared = cycle.spread.controller.prepare(before)
    return dataclasses.replace(prepared, slopes=cycle.run.slopes)  # decided where the cycle is built


# Schedules of torch, and states of objects whose code is not ours

#: Entries of torch's schedulers that follow from the arguments of their constructors.
_FIXED = (
    *("total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "use_beta1", "_milestones"),
    *("T_max", "T_0", "T_mult", "eta_min", "total_iters", "start_factor", "end_factor", "factor", "gamma"),
    *("step_size", "milestones", "power"),
)


def checked_schedule(
    here: dict[str, Any], saved: object, step: int, path: str, *, of_torch: bool = True
) -> dict[str, Any]:
    """Return the entries of a torch scheduler's saved state that it has here too, without those of other versions.

    Args:
        here: the state of the scheduler now.
        saved: the saved one.
        step: the step of the checkpoint, which the schedule must have too.
        path: how messages name ``saved``.
        of_torch: whether torch has the scheduler's class, so that its constants are known by name.
    """
    if not isinstance(saved, dict):
        expect(False, path, "a dict", saved)
        return {}
    known = {name: value for name, value in saved.items() if name in here}
    check_like(known, here, path, of_torch=of_torch)
    if isinstance(here.get("last_epoch"), int):
        expect(known["last_epoch"] == step, f"{path}.last_epoch", str(step), known["last_epoch"])
    return known


def check_like(value: Any, example: Any, path: str, *, of_torch: bool = False) -> None:
    """Raise ValueError unless ``value`` has the structure of an example: for objects whose code is not ours.

    Numbers are finite where the example's are. Where the example is None or empty, anything is accepted.

    Args:
        value: what was saved.
        example: the example.
        path: how messages name ``value``.
        of_torch: whether entries have the names that torch's schedulers give them: their constants must be equal.
    """
    if isinstance(example, dict) and example:
        expect(isinstance(value, dict), path, "a dict", value)
        # Names with an underscore are details that differ between versions of torch.
        needed = [name for name in example if str(name)[:1] != "_" or name == "_schedulers"]
        if missing := [f"{path}.{name}" for name in needed if name not in value]:
            raise ValueError(f"the checkpoint has no {', '.join(missing)}: {_DAMAGED}")
        for name in example.keys() & value.keys():
            if not (of_torch and _check_of_torch(name, value[name], example[name], f"{path}.{name}")):
                check_like(value[name], example[name], f"{path}.{name}", of_torch=of_torch)
    elif isinstance(example, list | tuple) and example:
        expect(isinstance(value, list | tuple), path, "a list", value)
        _check_length(path, value, len(example))
        for number, (entry, like) in enumerate(zip(value, example, strict=True)):
            check_like(entry, like, f"{path}[{number}]", of_torch=of_torch)
    elif isinstance(example, bool | str):
        from_plain(type(example), value, path)
    elif isinstance(example, Tensor) and (example.numel() != 1 or isinstance(value, Tensor)):
        from_plain(Tensor, value, path)
        integers = not example.is_floating_point()
        _check_tensor(path, value, tuple(example.shape), finite=example.numel() == 1, integers=integers)
    elif isinstance(example, int | float | Tensor):
        if isinstance(value, Tensor):
            _check_tensor(path, value, ())
        else:
            from_plain(float if math.isfinite(example) else AnyNumber, value, path)


def _check_of_torch(name: str, value: Any, here: Any, path: str) -> bool:
    """Check an entry of one of torch's schedulers by its name; return whether it is known by it."""
    if name in _FIXED:
        if not _equal(value, here):
            raise ValueError(
                f"the checkpoint was made with {path}={value!r:.80}, this scheduler has {here!r:.80}: build it with "
                "the arguments of the saved run"
            )
    elif name in ("base_lrs", "_last_lr"):
        for number, rate in enumerate(from_plain(list[Rate], value, path)):
            if isinstance(rate, Tensor):
                _check_tensor(f"{path}[{number}]", rate, None if rate.numel() == 1 else ())
        _check_length(path, value, len(here))
    elif name == "_step_count":
        from_plain(int, value, path)
    elif name == "last_epoch":
        from_plain(Annotated[int, Within(-1, 2**63 - 1)], value, path)
    else:
        return False
    return True


# A run without a learning rate


def scout_state(scouted: Scouted, phase: Scouting | None) -> dict[str, Any]:
    """Return the state of a run with ``max_lr=None``; ``phase`` is None once the learning rate is found."""
    return {
        "config": scouted.config,
        "ratios": scouted.ratios,
        "found": scouted.found,
        "phase": None if phase is None else phase.state_dict(),
    }


def checked_scout(scouted: Scouted | None, cycle: Cycle, state_dict: object) -> ScoutState | None:
    """Return the ``"scout"`` entry of a scheduler's state after checking it; None if there is none to check.

    Args:
        scouted: that of the scheduler that loads it; None if it was given a learning rate.
        cycle: the cycle of that scheduler.
        state_dict: the whole state.

    Raises:
        ValueError: naming the entry that is missing, damaged or of another run.
    """
    if not isinstance(state_dict, dict) or "hdet" not in state_dict:
        return None  # checked() refuses it
    plain: Any = unpacked(state_dict.get("scout"))
    if (plain is None) is not (scouted is None):
        there, here = ("a learning rate", "None") if plain is None else ("max_lr=None", "one")
        raise ValueError(
            f"the checkpoint was made with {there}, this scheduler has max_lr={here}: build it with the arguments of "
            "the saved run"
        )
    if plain is None or scouted is None:
        return None
    config = plain.get("config") if isinstance(plain, dict) else None
    for name, entry in scouted.config.items():
        _check_config(config.get(name) if isinstance(config, dict) else None, entry, name)
    saved: ScoutState = from_plain(ScoutState, plain, "scout")
    _check_length("scout.ratios", saved.ratios, len(cycle.optimizer.param_groups))
    if (saved.phase is None) is (saved.found is None):
        raise ValueError(f"the checkpoint's scout.found and scout.phase exclude each other: {_DAMAGED}")
    if saved.phase is not None:
        _check_phase(scouted, cycle, saved.phase)
    return saved


def _check_phase(scouted: Scouted, cycle: Cycle, phase: PhaseState) -> None:
    """Raise ValueError unless a process with the same replicas saved the phase, in one of its rounds."""
    rounds, path, ensemble = scouted.plan.rounds, "scout.phase", cycle.ensemble
    expect(phase.round < len(rounds), f"{path}.round", f"below {len(rounds)}", phase.round)
    expect(phase.step < rounds[phase.round], f"{path}.step", f"below {rounds[phase.round]}", phase.step)
    if phase.consensus:
        raise ValueError(
            "the checkpoint was saved inside scheduler.consensus() at step "
            f"{scouted.plan.before(phase.round) + phase.step}, while a learning rate was looked for: its model is the "
            "one that the run begins with. Begin the run anew, or load a checkpoint of step "
            f"{scouted.plan.steps} or later"
        )
    saved, here = phase.replicas, (ensemble.size, ensemble.replica, ensemble.rows, ensemble.part)
    if phase.step == 0:  # at the start of a round all replicas are equal
        saved = (saved[0], here[1], *saved[2:])
    if saved != here:
        names = ("replicas", "first replica", "replicas in a process", "shard")
        there, own = (", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True)) for values in (saved, here))
        raise ValueError(
            f"the checkpoint was saved while a learning rate was looked for, by a process with {there}, and this one "
            f"has {own}: in that time replicas differ, so load on every process its own file, or one that was saved "
            "later"
        )
    _check_by_row(f"{path}.probed", phase.probed, ensemble.rows, known=False)
    for name in ("first", "tail", "squares"):
        window: WindowState = getattr(phase.losses, name)
        _check_by_row(f"{path}.losses.{name}.sum", window.sum, ensemble.rows, known=False)
    begun = phase.round > 0 or phase.step > 0
    expect(phase.start is not None or not begun, f"{path}.start", "a copy of the start", phase.start)
    if phase.start is not None:
        _check_kept(cycle, phase.start, f"{path}.start", ensemble.rows, 0)
        _check_start(cycle, to_plain(phase.start))


def _check_start(cycle: Cycle, start: dict[str, Any]) -> None:
    # Replicas of a stack may have a state of their own now and shared one before, or the other way round.
    LastSound(cycle.optimizer, cycle.converger, None, cycle.buffers).check_state_dict({**start, "state": None})
    rows = cycle.ensemble.rows
    for name, now, kept in state_pairs(cycle.optimizer, start["state"] or {}):
        if kept.numel() not in (now.numel(), now.numel() * rows, now.numel() // rows):
            raise ValueError(
                f"the checkpoint's scout.phase.start.state.{name} has {kept.numel()} elements, the optimizer's "
                f"{now.numel()}: {_OTHER_MODEL}, and with its optimizer"
            )
