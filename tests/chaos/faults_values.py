"""Values that are not finite, or nearly not: in parameters, gradients, moments, buffers, losses and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.chaos.faults import Fault, Scene
from tests.chaos.replica import local

#: Writes a value somewhere in a replica.
Spoil = Callable[[Scene, float], object]
UNSOUND = "no replica is sound at step"
ALL_UNSOUND = UNSOUND + ".*{who}"


def put(scene: Scene, tensor: Tensor, value: float) -> None:
    """Write a value to one element of this rank's part of a tensor, in the row of the victim if it has rows."""
    part = local(tensor.detach())
    flat = (part if scene.here.stack is None else part[scene.case.row]).view(-1)
    if flat.numel():
        flat[scene.random.randrange(flat.numel())] = value


def parameter(scene: Scene) -> Any:
    """Return a parameter, the same on all ranks. An empty shard cannot be spoilt."""
    return scene.random.choice([param for _, param in scene.here.parameters() if local(param).numel()])


def losses(scene: Scene, value: float) -> Tensor:
    """Return losses of the replicas held here, with the value for that of the victim."""
    if scene.here.stack is None:
        return torch.tensor(value)
    found = torch.ones(scene.here.stack.replicas)
    found[scene.case.row] = value
    return found


def in_parameter(scene: Scene, value: float) -> None:
    put(scene, parameter(scene), value)


def in_gradient(scene: Scene, value: float) -> None:
    put(scene, parameter(scene).grad, value)


def in_state(name: str) -> Spoil:
    return lambda scene, value: put(scene, scene.here.optimizer.state[parameter(scene)][name], value)


def in_buffer(scene: Scene, value: float) -> None:
    put(scene, scene.random.choice([b for b in scene.here.own.buffers() if b.is_floating_point()]), value)


def in_loss(scene: Scene, value: float) -> None:
    scene.loss = scene.loss.clone()
    (scene.loss if scene.here.stack is None else scene.loss[scene.case.row]).fill_(value)


def in_recorded_loss(scene: Scene, value: float) -> None:
    scene.here.scheduler.record_loss(losses(scene, value))


def in_probe(scene: Scene, value: float) -> None:
    scene.here.in_probe = scene.once(lambda: losses(scene, value))


def in_batch(scene: Scene, value: float) -> None:
    scene.spoil_batch = lambda x: x[0, 0].fill_(value)


def of(spoil: Spoil, value: float = math.nan) -> Callable[[Scene], None]:
    return lambda scene: spoil(scene, value)


def each(what: str, spoil: Spoil, values: str = "nan inf", **options: Any) -> list[Fault]:
    """Return a fault for each value."""
    given: dict[str, Any] = {"at": "update", **options}
    return [Fault(f"{value} in a {what}", "healed", act=of(spoil, float(value)), **given) for value in values.split()]


def one_of_each(scene: Scene) -> None:
    """Spoil another thing on every rank."""
    kinds = [of(in_parameter), of(in_loss), of(in_buffer, math.inf), of(in_state("exp_avg"), math.inf)]
    kinds[scene.rank % 4](scene)


def every_row(act: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Return an act that spoils all replicas that a process holds."""

    def acts(scene: Scene) -> None:
        for row in range(scene.configuration.rows):
            object.__setattr__(scene.case, "row", row)  # of this process's copy of the case
            act(scene)

    return acts


def in_shared_moment(scene: Scene) -> None:
    scene.here.optimizer.state[parameter(scene)]["exp_avg"].fill_(math.nan)


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
    *each("gradient", in_gradient, "nan inf -inf", at="gradients", without="stack early"),
    *each("first moment", in_state("exp_avg"), without="stack"),
    *each("second moment", in_state("exp_avg_sq"), without="stack"),
    # A master that does not round to its parameter is made of the parameter again.
    *each("master weight", in_state("master"), needs="masters", excluded=False),
    *each("buffer", in_buffer),
    *each("loss", in_loss, "nan inf -inf"),
    *each("recorded loss", in_recorded_loss),
    *each("probe", in_probe, needs="probe", steps="inner", late=True),
    *each("batch", in_batch, at="forward", without="shared"),
    Fault("nan in parameters of two ranks", "healed", "update", of(in_parameter), on="two"),
    Fault("nan in all losses", "refused", "update", every_row(of(in_loss)), on="all", message=UNSOUND),
    Fault("nan in all parameters", "refused", "update", every_row(of(in_parameter)), on="all", message=ALL_UNSOUND),
    Fault("another value is bad on every rank", "refused", "update", every_row(one_of_each), on="all",
          message=ALL_UNSOUND),
    # A stack with shared gradients has its moments once and does not exchange them.
    Fault("nan in a moment that a stack shares", "refused", "update", in_shared_moment, needs="stack", steps="inner",
          message=UNSOUND),
    Fault("nan in a batch under shared gradients", "refused", "forward", of(in_batch), needs="shared", message=UNSOUND),
    # Ours: on a GPU, g² of torch's AdamW overflows.
    Fault("a gradient of 3e19", "healed", "gradients", of(in_gradient, 3e19), excluded=False, needs="ours",
          without="masters early"),
    Fault("no gradient for a parameter", "healed", "gradients", no_gradient, excluded=False, needs="local",
          without="early"),
    Fault("another number of batches", "healed", "update", another_count, excluded=False),
    Fault("parameters of 3e38 on all ranks", "healed", "update", same_huge_element, on="all", excluded=False,
          steps="last", needs="local", without="masters compress outer overlap"),
]  # fmt: skip
