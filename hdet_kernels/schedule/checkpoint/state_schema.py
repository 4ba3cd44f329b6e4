"""The schema of a scheduler's checkpoint: every entry, in one place. ``docs/checkpoint-format.md`` explains them.

Nothing here changes anything. ``checked_state.py`` checks a whole state by this schema before any of it is applied.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from hdet_kernels.controller.hypergradient import HypergradientController, SlopeController
from hdet_kernels.controller.regression import CHANGES, GRID_POINTS, RegressionController
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.converge.payload import Payload
from hdet_kernels.ops.wire import FORMATS
from hdet_kernels.schedule.checkpoint.schema import (
    RATE,
    AnyTensor,
    ByName,
    EmptyOr,
    Fields,
    Flag,
    FlatTensors,
    InOrder,
    Items,
    Like,
    Maybe,
    Missing,
    Number,
    OneOf,
    Schema,
    TensorOf,
    Text,
    Whole,
)
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.gradients import SLOPE_STEPS
from hdet_kernels.schedule.history import POINTS, WINDOW, Kind

_ANY = Number(finite=False)  # a loss may be NaN
_COUNT = Whole(0, 2**63 - 1)
_NOT_NEGATIVE = Number(0)
_PART = InOrder((_COUNT, Whole(1, 2**31)))  # number of a part of a replica, and how many there are


#: Entries of a record that earlier files of this format do not have.
ADDED = ("slopes", "errors", "posterior", "distance")

#: Entries that tell who saved the state, and when. The schema of the others depends on them.
HEAD = ("size", "replica", "rows", "part", "step", "averaged")


def head(cycle: Cycle) -> Fields:
    """Return the schema of the entries ``HEAD``."""
    counts = {**dict.fromkeys(("size", "rows"), Whole(1, 2**31)), "replica": _COUNT}
    return Fields({**counts, "part": _PART, "step": _step(cycle), "averaged": Flag()})


def names(cycle: Cycle) -> frozenset[str]:
    """Return the names of all entries."""
    return frozenset(body(cycle, size=1, rows=1, step=0).fields)


def body(cycle: Cycle, *, size: int, rows: int, step: int, own_part: bool = True) -> Fields:
    """Return the schema of the whole state.

    Args:
        cycle: the one that the state is meant for.
        size: replicas of the saved run, which may be others than here.
        rows: replicas in a process of the saved run.
        step: the saved step.
        own_part: whether the process that saved it held the same part of its replica. Tensors of another part are left
            out, whatever their shapes.
    """
    names = [hyper.name for hyper in cycle.spread.hyperparameters]
    groups = len(cycle.optimizer.param_groups)
    at_once = cycle.converger.bucket_bytes
    payload = cycle.converger.tensors.payload(include_state=False, reads=True, bucket_bytes=at_once)
    tensors = {
        "params": [tuple(t.shape) for t in payload.outlines],
        "buffers": [tuple(t.shape) for t in payload.buffers],
        "integers": [tuple(t.shape) for t in payload.integers],
    }
    return Fields(
        {
            "format": Whole(1),
            "version": Text(),
            "config": Like({}),  # compared entry by entry, see checked_state.py
            "size": Whole(1),
            "replica": Whole(0, size - 1),
            "rows": Whole(1, size),
            "part": _PART,
            "step": _step(cycle),
            "averaged": Flag(),
            "optimizer_state": Flag(),
            "run": Fields(
                {
                    "peak": Number(0, 1),
                    "peaks": Items(Maybe(_NOT_NEGATIVE), (len(cycle.run.peaks),)),
                    "end": Number(0, 1),
                }
            ),
            "shared": Maybe(Flag()),
            "spread": Fields(
                {
                    "scheduled": Items(RATE, (groups,)),
                    "controller": controller_state(cycle, len(names), step),
                }
            ),
            "window": Fields(
                {
                    "sum": _ANY if rows == 1 else OneOf(_ANY, Items(_ANY, (rows,))),
                    "count": Number(0, 2**63 - 1),
                    "ever": Flag(),
                }
            ),
            "displacement": Maybe(displacement(cycle, own_part=own_part)),
            "pending": Maybe(pending(len(names), size, rows, step, cycle.run.sync_every, tensors)),
            "compression": Maybe(
                compression(_elements(cycle, payload) if cycle.converger.compress and own_part else None)
            ),
            "outer": outer(rows) if cycle.config["outer"] is not None else Missing("outer=None here"),
            "begun": Flag(),
            "history": Items(record(cycle.before + step, tuple(names)), longest=WINDOW),
            "summary": summary(cycle.before + step, tuple(names)),
            "undo": Maybe(undo(rows, step)) if cycle.undoing else Missing("the controller undoes nothing here"),
        }
    )


def displacement(cycle: Cycle, *, own_part: bool) -> Fields:
    """Return the schema of the displacement by which slopes are measured from gradients.

    A run that measures none, because it has one replica for example, leaves it out, whatever its shapes.
    """
    groups = len(cycle.optimizer.param_groups)
    tensors: Schema = Items(Items(AnyTensor()), (groups,))
    if cycle.displacement is not None and own_part:
        shapes = cycle.displacement.shapes
        tensors = InOrder(tuple(InOrder(tuple(TensorOf(shape) for shape in group)) for group in shapes))
    ended = InOrder(tuple(InOrder(()) for _ in range(groups)))
    return Fields(
        {
            "last": OneOf(tensors, ended),
            "moved": Maybe(tensors),
            "slopes": Items(Items(_ANY, (len(set(cycle.spread.rate_of.values())),)), longest=SLOPE_STEPS),
            "apart": Flag(),
        }
    )


def pending(
    count: int, size: int, rows: int, step: int, sync_every: int, tensors: dict[str, list[tuple[int, ...]]]
) -> Fields:
    """Return the schema of an overlapped average that is under way.

    Args:
        count: number of hyperparameters.
        size, rows: replicas of the saved run, and of one of its processes.
        step: the saved step.
        sync_every: the longest that an average can be under way.
        tensors: shapes of the parameters, buffers and integer buffers that it corrects, as flat tensors.
    """
    by_replica = Items(Items(Number(), (size,)), (count,))
    buffers = tensors["buffers"]
    correction: dict[str, Schema] = {
        "sound": Items(Flag(), (rows,)),
        "heal": Flag(),
        "has_state": Flag(),
        "params": InOrder(tuple(TensorOf(shape) for shape in tensors["params"])),
        "buffers": InOrder(tuple(TensorOf(shape, finite=False) for shape in buffers)),
        "buffers_before": InOrder(tuple(TensorOf(shape, finite=False) for shape in buffers)),
        "state": ByName(TensorOf(finite=False)),
        "state_before": ByName(TensorOf(finite=False)),
        "integers": InOrder(tuple(TensorOf(shape, integers=True) for shape in tensors["integers"])),
        "counts": Maybe(TensorOf((-1,))),
    }
    outcome: dict[str, Schema] = {
        "losses": Items(_ANY, (size,)),
        "probes": Items(_ANY, (size,)),
        "healthy": Items(Flag(), (size,)),
        "shared": Maybe(Flag()),
        "bytes": _COUNT,
        "collectives": _COUNT,
        "seconds": _NOT_NEGATIVE,
        "kept": Maybe(Whole(0, step)),
        "distance": Maybe(_NOT_NEGATIVE),
    }
    return Fields(
        {
            "step": Whole(max(step - sync_every, 0), step),
            "due": Whole(step + 1, step + sync_every),
            "placed": Fields({"base": Items(Number(), (count,)), "values": by_replica, "applied": by_replica}),
            "acting": Flag(),
            "correction": Fields(correction),
            "outcome": Fields(outcome, optional=frozenset(("distance",))),
        }
    )


def compression(numel: int | None) -> Fields:
    """Return the schema of the compression's memory: of ``numel`` elements, or any number if None."""
    return Fields(
        {
            "format": Text(tuple(FORMATS)),
            "processes": Whole(1, 2**31 - 1),
            "consensus": FlatTensors(numel),
            "error": FlatTensors(numel),
            "shard_error": FlatTensors(),
        }
    )


def outer(rows: int) -> Fields:
    """Return the schema of the outer optimizer's state; ``OuterStep.check_state_dict`` compares its sizes."""
    return Fields(
        {
            "consensus": Items(TensorOf((-1,))),
            "velocity": Maybe(Items(TensorOf((-1,)))),
            "start": Maybe(Items(_ANY, (1, rows))),
            "part": InOrder((_COUNT, Whole(1))),
        }
    )


def undo(rows: int, step: int) -> Fields:
    """Return the schema of the last sound average, and of how often the replicas returned to one."""
    return Fields({"returns": _COUNT, "kept": Maybe(kept_copy(rows, step))})


def kept_copy(rows: int, step: int) -> Fields:
    """Return the schema of a copy that replicas can return to; ``LastSound.check_state_dict`` compares its shapes.

    Args:
        rows: replicas in a process.
        step: the saved step.
    """
    return Fields(
        {
            "step": Whole(0, step),
            "level": Maybe(Number()),
            "part": _PART,
            "rows": Whole(rows, rows),
            "params": Items(TensorOf(finite=False)),
            "buffers": Items(AnyTensor()),
            "state": Maybe(ByName(AnyTensor())),
            "others": Maybe(ByName(Like(None))),
            "compression": Maybe(compression(None)),
            "outer": Maybe(outer(rows)),
        }
    )


def record(step: int | None, names: tuple[str, ...] | None = None) -> Fields:
    """Return the schema of one record of the history of a run.

    Args:
        step: the steps that it has made; None: any.
        names: its hyperparameters; None: any.
    """
    fields: dict[str, Schema] = {
        "step": Whole(0, step),
        "cycle": Whole(0, step),
        "kind": Text(get_args(Kind)),
        "losses": Items(_ANY),
        "probes": Maybe(Items(_ANY)),
        "base": ByName(_NOT_NEGATIVE, names),
        "values": ByName(Items(_NOT_NEGATIVE), names),
        "excluded": Items(_COUNT),
        "gradients": Text(("shared", "local", "unknown")),
        "bytes": _COUNT,
        "collectives": _COUNT,
        "seconds": _NOT_NEGATIVE,
        "landed": Maybe(Whole(0, step)),
        "taken": Maybe(_COUNT),
        "undone": Maybe(Whole(0, step)),
        "slopes": Maybe(_some(Number(), names)),
        "errors": Maybe(_some(_NOT_NEGATIVE, names)),
        "posterior": Maybe(_some(InOrder((Number(), _NOT_NEGATIVE)), names)),
        "distance": Maybe(_NOT_NEGATIVE),
    }
    return Fields(fields, optional=frozenset(("landed", "taken", "undone", *ADDED)))


def _some(inner: Schema, names: tuple[str, ...] | None) -> Schema:
    """Return the schema of a dict with some of the names; None: any."""
    return ByName(inner) if names is None else Fields(dict.fromkeys(names, inner), optional=frozenset(names))


def summary(step: int, names: tuple[str, ...]) -> Fields:
    """Return the schema of the summary of all syncs of a run that has made ``step`` steps with these names."""
    extremes = Fields(dict.fromkeys(("first", "lowest", "highest", "last"), Number()))
    point = Fields({"step": Whole(0, step), "loss": Maybe(Number()), "base": ByName(_NOT_NEGATIVE, names)})
    return Fields(
        {
            **dict.fromkeys(("syncs", "collectives", "bytes", "excluded", "undone"), _COUNT),
            "seconds": _NOT_NEGATIVE,
            "base": EmptyOr(ByName(extremes, names)),
            "loss": EmptyOr(extremes),
            "every": Whole(1, 2**40),
            "points": Items(point, longest=2 * POINTS),
        }
    )


def controller_state(cycle: Cycle, count: int, step: int) -> Schema:
    """Return the schema of the controller's state for ``count`` hyperparameters after ``step`` steps.

    That of a controller from outside must look like the state that its ``start`` returns.
    """
    controller = cycle.spread.controller
    if controller is None:
        return Fields({})
    if type(controller) is SoftmaxController:
        return Fields(
            {
                "eta": Items(_NOT_NEGATIVE, (0, count)),
                "velocity": Items(Number(), (count,)),
                "gamma": Items(Number(highest=1), (0, count)),
            }
        )
    if type(controller) is HypergradientController:
        return Fields(_slope_fields(controller, count, step))
    if type(controller) is RegressionController:
        return Fields(_slope_fields(controller, count, step) | _regression_fields(controller, count))
    return Like(controller.start(count, cycle.run))


def _slope_fields(controller: SlopeController, count: int, step: int) -> dict[str, Schema]:
    return {
        "mu": Items(Number(-controller.limit, controller.limit), (count,)),
        "m": Items(Number(), (count,)),
        **{name: Items(_NOT_NEGATIVE, (count,)) for name in ("q", "s")},
        **{name: Items(Whole(0, step), (count,)) for name in ("observations", "updates")},
        "caps": Items(Maybe(_NOT_NEGATIVE), (0, count)),
    }


def _regression_fields(controller: RegressionController, count: int) -> dict[str, Schema]:
    soundness = Fields(
        {
            **{name: Number() for name in ("initial", "lowest", "last")},
            "changes": Items(_NOT_NEGATIVE, longest=CHANGES),
            "costs": Items(_ANY, longest=controller.settings.edge_cycles),
        }
    )
    return {
        "log_likelihood": Items(Items(Number(), (0, GRID_POINTS)), (count,)),
        "path_length": Items(_NOT_NEGATIVE, (count,)),
        "ceiling": Items(Maybe(Number(-controller.limit, controller.limit)), (count,)),
        "signs": Items(Number(-1, 1), (count,)),
        "noise": InOrder((_NOT_NEGATIVE, _NOT_NEGATIVE)),
        "soundness": Maybe(soundness),
    }


#: The history of formats 1 and 2, which had a record for every sync.
HISTORY = Items(record(None))


def _step(cycle: Cycle) -> Whole:
    return Whole(0, cycle.run.total_steps)


def _elements(cycle: Cycle, payload: Payload) -> int:
    """Return how many parameters of one replica are compressed."""
    compressed = (tensor for tensor in payload.outlines if tensor.dtype != torch.float64)
    return sum(map(Tensor.numel, compressed)) // cycle.ensemble.rows
