"""Values that are not finite, or nearly not: in parameters, gradients, moments, buffers, losses and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.chaos.faults import Fault, Scene, traits
from tests.chaos.replica import local

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
UNSOUND = "no replica is sound at step"


def put(scene: Scene, tensor: Tensor, value: float) -> None:
    """Write a value to one element of this rank's part of a tensor, in the row of the victim if it has rows."""
    part = local(tensor.detach())
    if scene.here.stack is not None:
        part = part[scene.case.row]
    flat = part.view(-1)
    if flat.numel():
        flat[scene.random.randrange(flat.numel())] = value


def parameter(scene: Scene) -> Tensor:
    """Return a parameter, the same on all ranks."""
    # BatchNorm's bias has no effect that Adam would not scale, and an empty shard cannot be spoilt.
    found = [param for _, param in scene.here.parameters() if local(param).numel()]
    return scene.random.choice(found)


def in_parameter(value: float) -> Callable[[Scene], None]:
    return lambda scene: put(scene, parameter(scene), value)


def in_gradient(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        gradient = parameter(scene).grad
        assert gradient is not None
        put(scene, gradient, value)

    return act


def in_moment(name: str, value: float) -> Callable[[Scene], None]:
    return lambda scene: put(scene, scene.here.optimizer.state[parameter(scene)][name], value)


def in_shared_moment(scene: Scene) -> None:
    scene.here.optimizer.state[parameter(scene)]["exp_avg"].fill_(math.nan)


def in_buffer(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        buffers = [buffer for buffer in scene.here.own.buffers() if buffer.is_floating_point()]
        put(scene, scene.random.choice(buffers), value)

    return act


def in_loss(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.loss = scene.loss.clone()
        if scene.here.stack is not None:
            scene.loss[scene.case.row] = value
        else:
            scene.loss.fill_(value)

    return act


def in_recorded_loss(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        stack = scene.here.stack
        losses: Any = value if stack is None else [1.0] * stack.replicas
        if stack is not None:
            losses[scene.case.row] = value
        scene.here.scheduler.record_loss(losses)

    return act


def in_probe(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        stack = scene.here.stack
        losses: Any = value
        if stack is not None:
            losses = torch.ones(stack.replicas)
            losses[scene.case.row] = value
        scene.here.in_probe = scene.once(lambda: losses)

    return act


def in_batch(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        def spoil(x: Tensor) -> None:
            x[0, 0] = value

        scene.spoil_batch = spoil

    return act


def each(
    what: str, act: Callable[[float], Callable[[Scene], None]], values: str = "nan inf", **options: Any
) -> list[Fault]:
    """Return a fault for each value."""
    given: dict[str, Any] = {"at": "update", **options}
    return [Fault(f"{value} in a {what}", "healed", act=act(VALUES[value]), **given) for value in values.split()]


def one_of_each(scene: Scene) -> None:
    """Spoil another thing on every rank."""
    kinds = [in_parameter(math.nan), in_loss(math.nan), in_buffer(math.inf), in_moment("exp_avg", math.inf)]
    kinds[scene.rank % 4](scene)


def every_row(act: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Return an act that spoils all replicas that a process holds."""

    def acts(scene: Scene) -> None:
        case = scene.case
        for row in range(scene.configuration.rows):
            object.__setattr__(case, "row", row)  # of this process's copy of the case
            act(scene)

    return acts


def no_gradient(scene: Scene) -> None:
    parameter(scene).grad = None


def another_count(scene: Scene) -> None:
    """Let the victim have seen more batches than the others."""
    for buffer in scene.here.own.buffers():
        if not buffer.is_floating_point():
            buffer.add_(5)


def same_huge_element(scene: Scene) -> None:
    """Make one element so large that the sum over replicas overflows, and their mean does not."""
    local(scene.here.parameters()[0][1].detach()).view(-1)[0] = 3e38


FAULTS = [
    *each("parameter", in_parameter, "nan inf -inf"),
    *each("gradient", in_gradient, "nan inf -inf", at="gradients", without=traits("stack")),
    *each("first moment", lambda v: in_moment("exp_avg", v), without=traits("stack")),
    *each("second moment", lambda v: in_moment("exp_avg_sq", v), without=traits("stack")),
    # A master that does not round to its parameter is made of the parameter again.
    *each("master weight", lambda v: in_moment("master", v), needs=traits("masters"), excluded=False),
    *each("buffer", in_buffer),
    *each("loss", in_loss, "nan inf -inf"),
    *each("recorded loss", in_recorded_loss),
    *each("probe", in_probe, needs=traits("probe"), steps="inner", late=True),
    *each("batch", in_batch, at="forward", without=traits("shared")),
    Fault("nan in parameters of two ranks", "healed", "update", in_parameter(math.nan), on="two"),
    Fault("nan in all losses", "refused", "update", every_row(in_loss(math.nan)), on="all", message=UNSOUND),
    Fault(
        "nan in all parameters", "refused", "update", every_row(in_parameter(math.nan)), on="all",
        message=rf"{UNSOUND}.*{{who}}",
    ),
    Fault(
        "another value is bad on every rank", "refused", "update", every_row(one_of_each), on="all",
        message=rf"{UNSOUND}.*{{who}}",
    ),
    # A stack with shared gradients has its moments once and does not exchange them.
    Fault(
        "nan in a moment that a stack shares", "refused", "update", in_shared_moment, needs=traits("stack"),
        steps="inner", message=UNSOUND,
    ),
    Fault(
        "nan in a batch under shared gradients", "refused", "forward", in_batch(math.nan), needs=traits("shared"),
        message=UNSOUND,
    ),
    # Ours: on a GPU, g² of torch's AdamW overflows.
    Fault("a gradient of 3e19", "healed", "gradients", in_gradient(3e19), excluded=False, needs=traits("ours"),
          without=traits("masters")),
    Fault("no gradient for a parameter", "healed", "gradients", no_gradient, excluded=False, needs=traits("local")),
    Fault("another number of batches", "healed", "update", another_count, excluded=False),
    Fault(
        "parameters of 3e38 on all ranks", "healed", "update", same_huge_element, on="all", excluded=False,
        steps="last", needs=traits("local"), without=traits("masters compress outer overlap"),
    ),
]  # fmt: skip
