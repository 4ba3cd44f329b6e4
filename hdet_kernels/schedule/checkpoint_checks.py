"""Compare a checkpoint with the scheduler that loads it, as a whole, before any of it is applied.

``checkpoint.py`` says what stands in a file. Here its settings, replicas, shapes and what belongs together are compared
with the run. Every function raises a ValueError that names the entry, and nothing is modified.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hdet_kernels.controller.hypergradient import HypergradientController, SlopeController
from hdet_kernels.controller.regression import GRID_POINTS, RegressionController
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.schedule.checkpoint import (
    DAMAGED,
    FORMAT,
    CompressionState,
    CycleState,
    DisplacementState,
    Floats,
    Integers,
    KeptState,
    Long,
    OuterState,
    PendingState,
    PhaseState,
    Positive,
    Rate,
    RegressionState,
    ScoutState,
    Sizes,
    SlopeState,
    SoftmaxState,
    WindowState,
    Within,
    expect,
    from_plain,
    hints_of,
    holds_part,
    run_of,
    to_plain,
    unpacked,
)
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.gradients import SLOPE_STEPS
from hdet_kernels.schedule.history import WINDOW
from hdet_kernels.schedule.losses import AnyNumber
from hdet_kernels.schedule.scout.phase import Scouted
from hdet_kernels.schedule.undo.undoing import FEWEST_LEFT, KeptStart
from hdet_kernels.version import __version__

_OTHER_MODEL = "resume with the model that it was saved with"


def checked(cycle: Cycle, state_dict: object) -> CycleState:
    """Return the cycle's part of a scheduler's state, which :func:`restore` can take.

    Raises:
        ValueError: naming the entry that is missing, unknown, damaged or of another run; nothing is modified.
    """
    own = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    if not isinstance(own, dict) or "config" not in own:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    plain = _of_this_format(cycle, own)
    _check_config(_without_others(plain["config"], cycle.config), cycle.config)
    sizes = _sizes(cycle, plain.get("size"), plain.get("rows"))
    saved: CycleState = from_plain(CycleState, plain, "hdet", sizes)
    step, total = saved.origin + saved.step, cycle.whole.total_steps
    expect(total is None or step <= total, "hdet.step", f"at most {total}, after hdet.origin={saved.origin}", step)
    expect(saved.first <= (saved.origin or saved.step), "hdet.first", f"at most {step}", saved.first)
    expect(not saved.origin or cycle.undoing is not None, "hdet.origin", "0 (nothing is undone here)", saved.origin)
    _check_anchor(saved, total)
    _check_replicas(cycle, saved)
    for number, rate in enumerate(saved.spread.scheduled):
        _check_rate(rate, f"hdet.spread.scheduled[{number}]")
    _check_by_row("hdet.window", saved.window, saved.rows)
    _check_history(cycle, saved)
    if saved.displacement is not None:
        _check_displacement(cycle, saved.displacement, own_part=holds_part(cycle, saved))
    if saved.pending is not None:
        _check_pending(cycle, saved, saved.pending)
    _check_converger(cycle, saved)
    _check_controller(cycle, saved, sizes)
    return saved


def _check_anchor(saved: CycleState, total: int | None) -> None:
    """Raise ValueError unless the schedule can go on from where it is, and from where it was before a trial."""
    attempt = saved.undo.attempt if saved.undo is not None else None
    end = math.inf if total is None else total
    if saved.anchor is not None:
        latest = min(saved.step, end - saved.origin - FEWEST_LEFT) if saved.origin else 0
        expect(saved.anchor[0] <= latest, "hdet.anchor[0]", f"at most {latest}", saved.anchor[0])
        expect(saved.anchor[1] <= end, "hdet.anchor[1]", f"at most {end}", saved.anchor[1])
    if attempt is not None:
        expect(attempt.position <= end, "hdet.undo.attempt.position", f"at most {end}", attempt.position)
        made, path = attempt.origin + attempt.step, "hdet.undo.attempt.step"
        expect(made == saved.origin, path, f"{saved.origin - attempt.origin}, when the trial began", attempt.step)


def _sizes(cycle: Cycle, size: object, rows: object) -> Sizes:
    """Return the lengths that :class:`.Long` names, for a state of so many replicas, so many of them in a process."""
    return {
        "replicas": from_plain(Positive, size, "hdet.size", {}),
        "rows": from_plain(Positive, rows, "hdet.rows", {}),
        "groups": len(cycle.optimizer.param_groups),
        "scalars": len(cycle.spread.hyperparameters),
        "rates": len(cycle.spread.tied),
        "peaks": len(cycle.run.peaks),
        "grid": GRID_POINTS,
    }


def _of_this_format(cycle: Cycle, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of format 3 or 4 in format 4; raise ValueError for another format."""
    if "format" not in state and "version" in state:
        raise ValueError(f"the checkpoint has no hdet.format: {DAMAGED}")
    saved = state.get("format", 1)
    if isinstance(saved, bool) or not isinstance(saved, int) or saved not in (3, FORMAT):
        unknown = ", ".join(f"hdet.{name}" for name in state if name not in hints_of(CycleState))
        raise ValueError(
            f"the checkpoint has format {saved!r:.40} of hdet_kernels {state.get('version', 'before 0.2.0')!r:.40}, "
            f"this is version {__version__}, which reads 3 and {FORMAT}"
            f"{f' and does not know {unknown}' if unknown else ''}: load it with the version that saved it"
        )
    now = {"undo": _with_start_alone, "spread": _with_trial}
    state = {name: now[name](entry) if name in now else entry for name, entry in state.items()}
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


def _with_start_alone(undo: Any) -> Any:
    """Return the entry ``"undo"`` without the copy of a later average, which version 0.2.0 kept in its place."""
    kept = undo.get("kept") if isinstance(undo, dict) else None
    if not isinstance(kept, dict) or "level" not in kept:
        return undo
    start = {name: entry for name, entry in kept.items() if name != "level"}
    return {**undo, "kept": start if start.get("step") == 0 else None}


def _with_trial(spread: Any) -> Any:
    """Return the entry ``"spread"`` with that of a trial, and without the costs that version 0.2.0 had instead."""
    controller = spread.get("controller") if isinstance(spread, dict) else None
    if not isinstance(controller, dict) or "soundness" not in controller or "trial" in controller:
        return spread
    course = controller["soundness"]
    if isinstance(course, dict):
        course = {name: entry for name, entry in course.items() if name != "costs"}
    return {**spread, "controller": {**controller, "soundness": course, "trial": None}}


def _without_others(saved: Any, here: dict[str, Any]) -> Any:
    """Return saved settings whose controller has the constants of the one here: another version may have others."""
    constants = saved.get("controller_constants") if isinstance(saved, dict) else None
    if not isinstance(constants, dict) or saved.get("controller") != here["controller"]:
        return saved

    def alike(theirs: Any, ours: Any) -> Any:
        if not isinstance(theirs, dict) or not isinstance(ours, dict):
            return theirs
        return {name: alike(theirs.get(name, value), value) for name, value in ours.items()}

    return {**saved, "controller_constants": alike(constants, here["controller_constants"])}


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


def _check_replicas(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError if a state of another number of replicas cannot be divided among those here."""
    there, here = (saved.size, saved.rows), (cycle.ensemble.size, cycle.ensemble.rows)
    expect(saved.replica < saved.size, "hdet.replica", f"below size={saved.size}", saved.replica)
    divides = not (saved.size % saved.rows or saved.replica % saved.rows)
    expect(divides, "hdet.rows", f"a divisor of size={saved.size} and of replica={saved.replica}", saved.rows)
    if saved.pending is not None and not holds_part(cycle, saved):
        raise ValueError(
            f"the checkpoint has part {saved.part[0]} of {saved.part[1]} of a replica and an overlapped average "
            f"under way, this process holds part {cycle.ensemble.part} of {cycle.ensemble.parts}: load the file of a "
            "process that held the same part, or call scheduler.converge() before saving, which applies the average"
        )
    if there == here:
        return
    into_cycle = saved.step % cycle.whole.sync_every
    several = max(there[1], here[1]) > 1
    of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (there, here))
    counts = f"the checkpoint has {there[0]} replicas{of_saved}", f"this run has {here[0]}{of_here.rstrip(',')}"
    if into_cycle and saved.origin + saved.step != cycle.whole.total_steps and not saved.averaged:
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


def _check_rate(rate: float | Tensor, path: str) -> None:
    if isinstance(rate, Tensor):
        expect(rate.numel() == 1, path, "a tensor of one number", rate)
        _check_finite(path, rate)


def _check_by_row(path: str, window: WindowState, rows: int) -> None:
    """Raise ValueError unless a window with losses has a sum, or one for each of several rows."""
    fine = not window.count or isinstance(window.sum, list) is (rows > 1)
    expect(fine, f"{path}.sum", f"{rows} numbers" if rows > 1 else "a number", window.sum)


def _check_finite(path: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"the checkpoint's {path} has values that are not finite: {DAMAGED}")


def _check_tensors(
    path: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], *, finite: bool = True
) -> None:
    """Raise ValueError unless there is a tensor of each shape, with finite values."""
    expect(len(tensors) == len(shapes), path, f"a list of {len(shapes)} tensors", tensors)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        name = f"{path}[{number}]"
        expect(tuple(tensor.shape) == shape, name, f"a tensor of shape {shape}", tensor)
        if finite:
            _check_finite(name, tensor)


def _check_history(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless there are as many records and points as belong to the number of syncs."""
    step, names = cycle.before + saved.origin + saved.step, {hyper.name for hyper in cycle.spread.hyperparameters}
    for number, record in enumerate(saved.history):
        path = f"hdet.history[{number}]"
        expect(record.step <= step, f"{path}.step", f"at most {step}", record.step)
        for name, found in (("base", record.base), ("values", record.values)):
            expect(found.keys() == names, f"{path}.{name}", f"a dict of {', '.join(names)}", ", ".join(found))
        for name, values in (record.posterior or {}).items():
            expect(len(values) == 2, f"{path}.posterior.{name}", "mean and deviation", values)
        _check_peaks(record.peaks or {}, f"{path}.peaks")
    summary = saved.summary
    expect(not summary.base or summary.base.keys() == names, "hdet.summary.base", ", ".join(names), summary.base)
    for name, extremes in {**summary.base, "loss": summary.loss}.items():
        known = not extremes or extremes.keys() == {"first", "lowest", "highest", "last"}
        expect(known, f"hdet.summary ({name})", "first, lowest, highest and last", ", ".join(extremes))
    _check_peaks(summary.peaks, "hdet.summary.peaks")
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
                f"{DAMAGED}"
            )


def _check_peaks(peaks: dict[str, list[float]], path: str) -> None:
    for name, values in peaks.items():
        expect(len(values) == 2, f"{path}.{name}", "the given peak and the present one", values)


def _check_displacement(cycle: Cycle, saved: DisplacementState, *, own_part: bool) -> None:
    """Raise ValueError unless it is one of this model. A run that measures none, or another part, leaves it out."""
    expect(len(saved.slopes) <= SLOPE_STEPS, "hdet.displacement.slopes", f"at most {SLOPE_STEPS} lists", saved.slopes)
    if cycle.displacement is None or not own_part:
        return
    for name, groups in (("last", saved.last if any(saved.last) else None), ("moved", saved.moved)):
        for number, (tensors, shapes) in enumerate(zip(groups or (), cycle.displacement.shapes, strict=False)):
            _check_tensors(f"hdet.displacement.{name}[{number}]", tensors, shapes)


def _check_pending(cycle: Cycle, saved: CycleState, pending: PendingState) -> None:
    """Raise ValueError unless an average under way is one of this model and of the saved replicas."""
    step, path, span = saved.step, "hdet.pending", cycle.run.sync_every
    expect(step - span <= pending.step <= step, f"{path}.step", f"from {max(step - span, 0)} to {step}", pending.step)
    expect(step < pending.due <= step + span, f"{path}.due", f"from {step + 1} to {step + span}", pending.due)
    outcome, correction = pending.outcome, pending.correction
    expect((outcome.kept or 0) <= saved.origin + step, f"{path}.outcome.kept", f"at most {step}", outcome.kept)
    path = f"{path}.correction"
    payload = cycle.converger.tensors.payload(include_state=True, reads=True)
    _check_tensors(f"{path}.params", correction.params, [tuple(t.shape) for t in payload.outlines])
    buffers = [tuple(t.shape) for t in payload.buffers]
    _check_tensors(f"{path}.buffers", correction.buffers, buffers, finite=False)
    _check_tensors(f"{path}.buffers_before", correction.buffers_before, buffers, finite=False)
    _check_tensors(f"{path}.integers", correction.integers, [tuple(t.shape) for t in payload.integers])
    if correction.counts is not None:
        _check_finite(f"{path}.counts", correction.counts)
    here = {name: t.shape for name, t in payload.state.items()}
    for name in correction.state.keys() | correction.state_before.keys():
        both = [each.get(name) for each in (correction.state, correction.state_before)]
        shapes = [None if tensor is None else tensor.shape for tensor in both]
        if None in shapes or shapes[0] != shapes[1] or here.get(name, shapes[0]) != shapes[0]:
            raise ValueError(
                f"the checkpoint's {path}.state.{name} and state_before.{name} have shapes {shapes[0]} and "
                f"{shapes[1]}, the optimizer's state {here.get(name, 'none yet')}: load an undamaged checkpoint of "
                "this model"
            )


def _check_converger(cycle: Cycle, saved: CycleState) -> None:
    """Raise ValueError unless what averages remember, and the copy that replicas return to, are of this model."""
    if saved.compression is not None:
        _check_compression(cycle, saved.compression, "hdet.compression", own_part=holds_part(cycle, saved))
    if saved.outer is not None:
        expect(cycle.config["outer"] is not None, "hdet.outer", "None (outer=None here)", to_plain(saved.outer))
        _check_outer(saved.outer, "hdet.outer", saved.rows)
    if holds_part(cycle, saved):
        cycle.converger.check_state_dict(to_plain(saved.compression))
    cycle.converger.check_outer_state_dict(to_plain(saved.outer))
    if saved.undo is not None:
        undoes = cycle.undoing is not None
        expect(undoes, "hdet.undo", "None (the controller undoes nothing here)", to_plain(saved.undo))
    if cycle.undoing is None or saved.undo is None:
        return
    copies = [(cycle.undoing.start, saved.undo.kept, "hdet.undo.kept")]
    if (attempt := saved.undo.attempt) is not None:
        copies.append((cycle.undoing.aside, attempt.kept, "hdet.undo.attempt.kept"))
    for keeper, kept, path in copies:
        if kept is not None:
            _check_kept(cycle, kept, path, saved.rows, saved.origin + saved.step)
            keeper.check_state_dict(to_plain(kept), path)


def _check_compression(cycle: Cycle, saved: CompressionState, path: str, *, own_part: bool) -> None:
    """Raise ValueError unless the memory of the compression has the elements of one replica here."""
    payload = cycle.converger.tensors.payload(include_state=False, reads=True)
    here = sum(t.numel() for t in payload.outlines if t.dtype != torch.float64) // cycle.ensemble.rows
    for name in ("consensus", "error", "shard_error"):
        tensors = getattr(saved, name)
        found = sum(tensor.numel() for tensor in tensors)
        # The size comes first: a tensor of one element can claim to be as large as memory allows.
        if cycle.converger.compress and own_part and name != "shard_error" and found != here:
            raise ValueError(
                f"the checkpoint's {path}.{name} has {found} elements, this model has {here}: {_OTHER_MODEL}"
            )
        for number, tensor in enumerate(tensors):
            _check_finite(f"{path}.{name}[{number}]", tensor)


def _check_outer(saved: OuterState, path: str, rows: int) -> None:
    """Raise ValueError unless numbers are finite; ``OuterStep.check_state_dict`` compares the sizes."""
    for name, tensors in (("consensus", saved.consensus), ("velocity", saved.velocity or ())):
        for number, tensor in enumerate(tensors):
            _check_finite(f"{path}.{name}[{number}]", tensor)
    expect(saved.start is None or len(saved.start) in (1, rows), f"{path}.start", f"1 or {rows} numbers", saved.start)


def _check_kept(cycle: Cycle, saved: KeptState, path: str, rows: int, step: int) -> None:
    """Raise ValueError unless this is a copy of ``rows`` replicas; ``KeptStart.check_state_dict`` compares shapes."""
    expect(saved.step <= step, f"{path}.step", f"at most {step}", saved.step)
    expect(saved.rows == rows, f"{path}.rows", str(rows), saved.rows)
    if saved.compression is not None:
        _check_compression(cycle, saved.compression, f"{path}.compression", own_part=False)
    if saved.outer is not None:
        _check_outer(saved.outer, f"{path}.outer", rows)


def _check_controller(cycle: Cycle, saved: CycleState, sizes: Sizes) -> None:
    """Raise ValueError unless the controller's states fit it and give every hyperparameter a base value."""
    _check_state_of_controller(cycle, saved, saved.spread.controller, "hdet.spread.controller", sizes)
    if saved.undo is not None and (attempt := saved.undo.attempt) is not None:
        _check_state_of_controller(cycle, saved, attempt.state, "hdet.undo.attempt.state", sizes)
    try:
        for origin in {saved.origin, saved.undo.attempt.origin if saved.undo and saved.undo.attempt else saved.origin}:
            run_of(cycle, saved, origin)
    except Exception as error:
        controller = type(cycle.spread.controller).__name__
        expect(False, "hdet.run", f"one that {controller} can work in ({error})", to_plain(saved.run))


def _check_state_of_controller(cycle: Cycle, saved: CycleState, own: dict[str, Any], path: str, sizes: Sizes) -> None:
    controller = cycle.spread.controller
    if controller is None:
        expect(not own, path, "an empty dict", own)
        return
    state: dict[type, type] = {
        SoftmaxController: SoftmaxState,
        HypergradientController: SlopeState,
        RegressionController: RegressionState,
    }
    if (kind := state.get(type(controller))) is None:
        check_like(own, controller.start(len(cycle.spread.hyperparameters), cycle.run), path)
    else:
        read = from_plain(kind, own, path, sizes)
        if isinstance(controller, SlopeController):
            for number, mu in enumerate(read.mu):
                low, high = controller.lowest, controller.limit
                expect(low <= mu <= high, f"{path}.mu[{number}]", f"from {low:g} to {high:g}", mu)
    for index, hyper in enumerate(cycle.spread.hyperparameters):
        scheduled = saved.spread.scheduled[hyper.groups[0]] if hyper.base is None else hyper.base
        try:
            value = controller.base(copy.deepcopy(own), index, scheduled)
            fine, why = math.isfinite(value) and float(value) >= 0, f"not {value}"
        except Exception as error:  # a controller may raise anything
            fine, why = False, repr(error)
        expect(fine, path, f"one that gives {hyper.name} a value ({why})", own)


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
            raise ValueError(f"the checkpoint has no {', '.join(missing)}: {DAMAGED}")
        for name in example.keys() & value.keys():
            if not (of_torch and _check_of_torch(name, value[name], example[name], f"{path}.{name}")):
                check_like(value[name], example[name], f"{path}.{name}", of_torch=of_torch)
    elif isinstance(example, list | tuple) and example:
        fine = isinstance(value, list | tuple) and len(value) == len(example)
        expect(fine, path, f"a list of {len(example)} entries", value)
        for number, (entry, like) in enumerate(zip(value, example, strict=True)):
            check_like(entry, like, f"{path}[{number}]", of_torch=of_torch)
    elif isinstance(example, bool | str):
        from_plain(type(example), value, path, {})
    elif isinstance(example, Tensor) and (example.numel() != 1 or isinstance(value, Tensor)):
        from_plain(Floats if example.is_floating_point() else Integers, value, path, {})
        _check_tensors(path, [value], [tuple(example.shape)], finite=example.numel() == 1)
    elif isinstance(example, int | float | Tensor):
        read = from_plain(Rate if isinstance(value, Tensor) else AnyNumber, value, path, {})
        expect(not isinstance(read, Tensor) or read.numel() == 1, path, "a number", read)
        expect(not math.isfinite(example) or math.isfinite(read), path, "a finite number", value)


def _check_of_torch(name: str, value: Any, here: Any, path: str) -> bool:
    """Check an entry of one of torch's schedulers by its name; return whether it is known by it."""
    if name in _FIXED:
        if not _equal(value, here):
            raise ValueError(
                f"the checkpoint was made with {path}={value!r:.80}, this scheduler has {here!r:.80}: build it with "
                "the arguments of the saved run"
            )
    elif name in ("base_lrs", "_last_lr"):
        rates = from_plain(Annotated[list[Rate], Long("here")], value, path, {"here": len(here)})
        for number, rate in enumerate(rates):
            _check_rate(rate, f"{path}[{number}]")
    elif name == "_step_count":
        from_plain(int, value, path, {})
    elif name == "last_epoch":
        from_plain(Annotated[int, Within(-1, 2**63 - 1)], value, path, {})
    else:
        return False
    return True


# A run without a learning rate


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
    found = plain.get("config") if isinstance(plain, dict) else None
    config: dict[str, Any] = found if isinstance(found, dict) else {}
    own = dict(scouted.config)
    rounds = {name: own.pop(name) for name in ("rounds", "teams")}  # of these replicas; they end with the phase
    for name, entry in own.items():
        _check_config(config.get(name), entry, name)
    cycle_part: Any = unpacked(state_dict["hdet"])
    replicas = [cycle_part.get(name) if isinstance(cycle_part, dict) else None for name in ("size", "rows")]
    if isinstance(phase := plain.get("phase"), dict):
        plain = {**plain, "phase": {**phase, "start": _with_start_alone({"kept": phase.get("start")})["kept"]}}
    saved: ScoutState = from_plain(ScoutState, plain, "scout", _sizes(cycle, *replicas))
    if (saved.phase is None) is (saved.found is None):
        raise ValueError(f"the checkpoint's scout.found and scout.phase exclude each other: {DAMAGED}")
    if saved.phase is not None:
        _check_scouting_replicas(cycle, saved.phase)
        for name, entry in rounds.items():
            _check_config(config.get(name), entry, name)
        _check_phase(scouted, cycle, saved.phase)
    return saved


def _check_scouting_replicas(cycle: Cycle, phase: PhaseState) -> None:
    """Raise ValueError unless a process with the same replicas saved the phase."""
    ensemble = cycle.ensemble
    saved, here = phase.replicas, (ensemble.size, ensemble.replica, ensemble.rows, ensemble.part)
    if phase.step == 0:  # at the start of a round all replicas are equal
        saved = (saved[0], here[1], *saved[2:])
    if saved == here:
        return
    names = ("replicas", "first replica", "replicas in a process", "shard")
    there, own = (", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True)) for values in (saved, here))
    raise ValueError(
        f"the checkpoint was saved while a learning rate was looked for, by a process with {there}, and this one has "
        f"{own}: in that time every replica has a learning rate of its own. Resume with as many replicas, and load on "
        "every process its own file, or one that was saved later"
    )


def _check_phase(scouted: Scouted, cycle: Cycle, phase: PhaseState) -> None:
    """Raise ValueError unless the phase is in one of its rounds, and what it keeps is of this model."""
    rounds, path, ensemble = scouted.plan.rounds, "scout.phase", cycle.ensemble
    expect(phase.round < len(rounds), f"{path}.round", f"below {len(rounds)}", phase.round)
    expect(phase.step < rounds[phase.round], f"{path}.step", f"below {rounds[phase.round]}", phase.step)
    compared = 2 * sum(scouted.plan.in_teams(number) for number in range(phase.round))
    expect(len(phase.near) == compared, f"{path}.near", f"{compared} entries", phase.near)
    if phase.consensus:
        raise ValueError(
            "the checkpoint was saved inside scheduler.consensus() at step "
            f"{scouted.plan.before(phase.round) + phase.step}, while a learning rate was looked for: its model is the "
            "one that the run begins with. Begin the run anew, or load a checkpoint of step "
            f"{scouted.plan.steps} or later"
        )
    for name in ("first", "tail", "squares"):
        _check_by_row(f"{path}.losses.{name}", getattr(phase.losses, name), ensemble.rows)
    begun = phase.round > 0 or phase.step > 0
    expect(phase.start is not None or not begun, f"{path}.start", "a copy of the start", phase.start)
    if phase.start is not None:
        _check_kept(cycle, phase.start, f"{path}.start", ensemble.rows, 0)
        start = KeptStart(cycle.optimizer, cycle.converger, None, cycle.buffers)
        start.check_state_dict(to_plain(phase.start), f"{path}.start")
