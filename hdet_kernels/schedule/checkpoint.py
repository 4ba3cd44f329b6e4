"""Save a run as plain values and tensors, and restore it.

The dataclasses below are the file: every field is a key, and its type says what may stand there. A field with a default
may be missing. :func:`from_plain` reads them from a state dict and raises a ValueError that names the first entry that
is not as expected; :func:`to_plain` turns them back. ``checkpoint_checks.py`` compares a state with the scheduler that
loads it. Nothing is modified before all of that has passed. Then :func:`restore` applies it; if that fails after all,
because a setter of the user raises, :func:`undone_on_error` brings everything back. ``docs/checkpoint-format.md``
explains every key.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet_kernels.controller.protocol import Run
from hdet_kernels.schedule.attachment import untouched_on_error
from hdet_kernels.schedule.cycle import Cycle, Overlapping
from hdet_kernels.schedule.history import History, SyncRecord
from hdet_kernels.schedule.losses import AnyNumber, LossWindow
from hdet_kernels.schedule.scout.phase import Scouted, Scouting
from hdet_kernels.version import __version__

log = logging.getLogger("hdet_kernels")

#: Raised when a key changes its name or its meaning. Format 3 is that of the first files of version 0.2.0.
FORMAT = 4

DAMAGED = "load an undamaged checkpoint"

Kind = TypeVar("Kind")
Sizes = Mapping[str, int]


# What is in a file


@dataclass(frozen=True)
class Within:
    """The range of a number."""

    lowest: float
    highest: float = math.inf


@dataclass(frozen=True)
class Long:
    """The length of a list: the number of ``of``, or 0 where it may be empty."""

    of: str
    or_empty: bool = False

    def check(self, value: Sequence[Any], path: str, sizes: Sizes) -> None:
        wanted = {sizes[self.of], 0} if self.or_empty else {sizes[self.of]}
        expect(len(value) in wanted, path, f"a list of {' or '.join(map(str, wanted))} entries", value)


@dataclass(frozen=True)
class Holds:
    """The values of a tensor: floating-point numbers or integers, in so many dimensions."""

    integers: bool = False
    dimensions: int | None = None

    def check(self, value: Tensor, path: str, sizes: Sizes) -> None:
        kind = "n integer" if self.integers else " floating-point"
        fine = value.is_floating_point() is not self.integers and self.dimensions in (None, value.dim())
        expect(fine, path, f"a{kind} tensor{' of one dimension' if self.dimensions else ''}", value)


Positive = Annotated[int, Within(1, 2**31)]
Share = Annotated[float, Within(0, 1)]
NotNegative = Annotated[float, Within(0)]
Part = tuple[int, Positive]  # number of a part of a replica, and how many there are
Floats = Annotated[Tensor, Holds()]
Flat = Annotated[Tensor, Holds(dimensions=1)]
Integers = Annotated[Tensor, Holds(integers=True)]
Rate = Floats | NotNegative
PerGroup = Annotated[list[Kind], Long("groups")]
PerRow = Annotated[list[Kind], Long("rows")]
PerReplica = Annotated[list[Kind], Long("replicas")]
PerScalar = Annotated[list[Kind], Long("scalars")]
PerScalarOrNone = Annotated[list[Kind], Long("scalars", or_empty=True)]


@dataclass(frozen=True)
class RunFacts:
    peak: Share
    peaks: Annotated[list[NotNegative | None], Long("peaks")]
    end: Share


@dataclass(frozen=True)
class SpreadState:
    scheduled: PerGroup[Rate]
    controller: dict[str, Any]  # one of the classes below, or that of a controller from outside


@dataclass(frozen=True)
class SoftmaxState:
    eta: PerScalarOrNone[NotNegative]
    velocity: PerScalar[float]
    gamma: PerScalarOrNone[Annotated[float, Within(-math.inf, 1)]]


@dataclass(frozen=True)
class SlopeState:
    mu: PerScalar[float]
    m: PerScalar[float]
    q: PerScalar[NotNegative]
    s: PerScalar[NotNegative]
    observations: PerScalar[int]
    updates: PerScalar[int]
    caps: PerScalarOrNone[NotNegative | None]


@dataclass(frozen=True)
class SoundnessState:
    initial: float
    lowest: float
    last: float
    changes: list[NotNegative]
    before: float | None = None
    bends: list[NotNegative] = dataclasses.field(default_factory=list)
    slopes: float = 0.0
    count: int = 0
    path: NotNegative = 0.0


@dataclass(frozen=True)
class TrialState:
    step: Positive
    level: AnyNumber
    noise: AnyNumber


@dataclass(frozen=True)
class RegressionState(SlopeState):
    log_likelihood: PerScalar[Annotated[list[float], Long("grid", or_empty=True)]]
    path_length: PerScalar[NotNegative]
    ceiling: PerScalar[float | None]
    signs: PerScalar[Annotated[float, Within(-1, 1)]]
    noise: tuple[NotNegative, NotNegative]
    soundness: SoundnessState | None
    trial: TrialState | None = None


@dataclass(frozen=True)
class WindowState:
    sum: PerRow[AnyNumber] | AnyNumber
    count: Annotated[float, Within(0, 2**63 - 1)]
    ever: bool


@dataclass(frozen=True)
class DisplacementState:
    last: PerGroup[list[Floats]]
    moved: PerGroup[list[Floats]] | None
    slopes: list[Annotated[list[AnyNumber], Long("rates")]]
    apart: bool


@dataclass(frozen=True)
class PlacementState:
    base: PerScalar[float]
    values: PerScalar[PerReplica[float]]
    applied: PerScalar[PerReplica[float]]


@dataclass(frozen=True)
class CorrectionState:
    sound: PerRow[bool]
    heal: bool
    has_state: bool
    params: list[Floats]
    buffers: list[Floats]
    buffers_before: list[Floats]
    state: dict[str, Floats]
    state_before: dict[str, Floats]
    integers: list[Integers]
    counts: Flat | None


@dataclass(frozen=True)
class OutcomeState:
    losses: PerReplica[AnyNumber]
    probes: PerReplica[AnyNumber]
    healthy: PerReplica[bool]
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
    consensus: list[Flat]
    error: list[Flat]
    shard_error: list[Flat]


@dataclass(frozen=True)
class OuterState:
    consensus: list[Flat]
    velocity: list[Flat] | None
    start: list[AnyNumber] | None
    part: Part


@dataclass(frozen=True)
class KeptState:
    step: int
    part: Part
    rows: int
    params: list[Floats]
    buffers: list[Tensor | None]  # None: one that was replaced since
    state: dict[str, Tensor] | None
    others: dict[str, Any] | None
    compression: CompressionState | None
    outer: OuterState | None


@dataclass(frozen=True)
class AttemptState:
    origin: int
    step: int
    position: NotNegative
    state: dict[str, Any]
    kept: KeptState | None


@dataclass(frozen=True)
class UndoState:
    returns: int
    kept: KeptState | None
    attempt: AttemptState | None = None


@dataclass(frozen=True)
class Point:
    step: int
    loss: float | None
    base: dict[str, float]


@dataclass(frozen=True)
class Event:
    step: int
    why: str


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
    lost: int = 0
    aside: int = 0
    events: list[Event] = dataclasses.field(default_factory=list)
    peaks: dict[str, list[float]] = dataclasses.field(default_factory=dict)


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
    origin: int = 0
    first: int = 0
    anchor: tuple[int, NotNegative] | None = None  # None: the schedule began again at its first step


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
    probed: PerRow[AnyNumber] | AnyNumber
    certain: bool
    shared_state: bool
    fresh: bool
    start: KeptState | None
    consensus: bool = False
    near: list[tuple[NotNegative, AnyNumber, NotNegative]] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class ScoutState:
    """The entry ``"scout"`` of the state of a scheduler with ``max_lr=None``."""

    config: dict[str, Any]
    ratios: PerGroup[NotNegative]
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


def from_plain(kind: Any, value: Any, path: str, sizes: Sizes) -> Any:
    """Return ``value`` as the type ``kind`` says; dataclasses are read from dicts.

    Numbers are finite, and whole numbers are from 0 to 2^63 − 1, unless :class:`Within` says otherwise.

    Args:
        kind: the type.
        value: the plain value.
        path: how messages name it.
        sizes: the lengths that :class:`Long` names.

    Raises:
        ValueError: naming the path of the first entry that is not as expected.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        if arguments[1] is None or isinstance(arguments[1], Within):
            return _number(arguments[0], value, path, arguments[1])
        read = from_plain(arguments[0], value, path, sizes)
        arguments[1].check(read, path, sizes)
        return read
    if origin in (Union, UnionType):
        return _one_of(arguments, value, path, sizes)
    if dataclasses.is_dataclass(kind):
        return _fields(kind, value, path, sizes)
    if origin is dict:
        named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        expect(named, path, "a dict with names as keys", value)
        return {name: from_plain(arguments[1], entry, f"{path}.{name}", sizes) for name, entry in value.items()}
    if origin in (list, tuple):
        expect(isinstance(value, list | tuple), path, "a list", value)
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(value)
        expect(len(kinds) == len(value), path, f"a list of {len(kinds)} entries", value)
        entries = enumerate(zip(kinds, value, strict=True))
        return origin(from_plain(kind, entry, f"{path}[{number}]", sizes) for number, (kind, entry) in entries)
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
    finite = number and abs(value) <= sys.float_info.max  # a whole number may be beyond the range of floats
    if within is None:  # a loss, which may be NaN
        expect(number and (finite or isinstance(value, float)), path, "a number", value)
        return value
    name, ends = "a whole number" if kind is int else "a finite number", [within.lowest, within.highest]
    bounds = "" if not any(map(math.isfinite, ends)) else f" from {ends[0]:g} to {ends[1]:g}"
    fine = finite and within.lowest <= value <= within.highest
    expect(fine, path, name + bounds, value)
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, path: str, sizes: Sizes) -> Any:
    """Return ``value`` as one of several types: None, or the last one that may fit, whose error is the best."""
    if value is None and type(None) in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with contextlib.suppress(ValueError):
            return from_plain(kind, value, path, sizes)
    return from_plain(last, value, path, sizes)


@cache
def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fields(kind: Any, value: Any, path: str, sizes: Sizes) -> Any:
    expect(isinstance(value, dict), path, "a dict", value)
    hints = hints_of(kind)
    needed = [field.name for field in dataclasses.fields(kind) if _is_needed(field)]
    if missing := [f"{path}.{name}" for name in needed if name not in value]:
        raise ValueError(f"the checkpoint has no {', '.join(missing)}: {DAMAGED}")
    if unknown := [f"{path}.{name}" for name in value if name not in hints]:
        raise ValueError(
            f"the checkpoint has entries that hdet_kernels {__version__} does not know: {', '.join(unknown)}: load it "
            "with the version that saved it"
        )
    return kind(**{name: from_plain(hints[name], entry, f"{path}.{name}", sizes) for name, entry in value.items()})


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
    raise ValueError(f"the checkpoint's {path} must be {expected}, got {shown}: {DAMAGED}")


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


def scout_state(scouted: Scouted, phase: Scouting | None) -> dict[str, Any]:
    """Return the state of a run with ``max_lr=None``; ``phase`` is None once the learning rate is found."""
    return {
        "config": scouted.config,
        "ratios": scouted.ratios,
        "found": scouted.found,
        "phase": None if phase is None else phase.state_dict(),
    }


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
        "origin": cycle.origin,
        "first": cycle.first,
        "anchor": list(cycle.anchor),
    }


def restore(cycle: Cycle, saved: CycleState) -> None:
    """Bring ``cycle`` to a state that was checked, at this replica's own place in the spread."""
    ensemble = cycle.ensemble
    same_replicas = (saved.replica, saved.size) == (ensemble.replica, ensemble.size)
    same_part = holds_part(cycle, saved)
    own = same_replicas and same_part
    if not same_replicas and not saved.averaged:
        log.warning(
            "the checkpoint was saved by replica %d at step %d, when the replicas differed, and replica %d resumes "
            "from it: the parameters are not the average of all replicas, and training goes on from other ones than "
            "it had. Save where scheduler.in_sync is True or inside scheduler.consensus(), or have every rank save "
            "and load a file of its own",
            *(saved.replica, cycle.before + saved.origin + saved.step, ensemble.replica),
        )
    cycle.origin, cycle.first, cycle.run = saved.origin, saved.first, run_of(cycle, saved, saved.origin)
    cycle.anchor = saved.anchor or (0, saved.first)
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
        cycle.undoing.load_state_dict(to_plain(saved.undo), own=own, run_from=partial(run_of, cycle, saved))
    cycle.started, cycle.averaged = saved.begun, saved.averaged
    if cycle.start is not None:
        cycle.start.forget_buffers() if cycle.started else cycle.start.keep_buffers()
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
    for kept in (undoing.start, undoing.aside) if undoing else ():
        parts += [undoing, kept, kept.copy]
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
                f"{type(scheduler).__name__} refuses the checkpoint's base_scheduler ({error!r}): {DAMAGED}"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


def config_of(state_dict: object) -> dict[str, Any]:
    """Return the settings in a scheduler's state; empty if it is damaged."""
    hdet = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    config = hdet.get("config") if isinstance(hdet, dict) else None
    return config if isinstance(config, dict) else {}


def holds_part(cycle: Cycle, saved: CycleState) -> bool:
    """Return whether this process holds the part of its replica that the process which saved the state held."""
    return saved.part == (cycle.ensemble.part, cycle.ensemble.parts)


def run_of(cycle: Cycle, saved: CycleState, origin: int) -> Run:
    """Return the run that began after ``origin`` steps, as the controller prepared it in the saved run.

    A schedule that is built on an optimizer that was loaded before begins somewhere else and may look otherwise.
    """
    facts: dict[str, Any] = {"peak": saved.run.peak, "peaks": tuple(saved.run.peaks), "end": saved.run.end}
    whole, controller = cycle.whole, cycle.spread.controller
    same = all(getattr(whole, name) == value for name, value in facts.items())
    if controller is None or (same and not origin):
        return whole
    prepared = controller.prepare(dataclasses.replace(whole.rest(origin), **facts))
    return dataclasses.replace(prepared, slopes=whole.slopes)  # decided where the cycle is built
