"""What happens inside a step that ``in_backward`` has begun: between the backward pass and ``optimizer.step()``.

What the backward pass has used cannot be changed any more. Such a change is an error on every rank that makes it, and
the run is resumed from a checkpoint; what changes nothing leaves no trace.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.chaos.faults import Fault, Injected, Scene
from tests.chaos.faults_calls import once_in, refused

CHANGED = r"between backward\(\) and step\(\)"


def clip(scene: Scene, limit: float) -> None:
    nn.utils.clip_grad_norm_([param for _, param in scene.here.parameters()], limit)


def replace_gradients(scene: Scene) -> None:
    for _, param in scene.here.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def write_one_gradient(scene: Scene) -> None:
    next(param.grad for _, param in scene.here.parameters() if param.grad is not None).mul_(0.5)


def drop_gradients(scene: Scene) -> None:
    scene.here.module.zero_grad()


def set_group(name: str, value: Any) -> Any:
    def act(scene: Scene) -> None:
        scene.here.optimizer.param_groups[0][name] = value

    return act


def move_parameters(scene: Scene) -> None:
    """Give what is left for ``step()`` other memory, with the same values."""
    for _, param in scene.here.parameters():
        if param.grad is not None:
            param.data = param.data.clone()


def save(scene: Scene) -> None:
    scene.here.optimizer.state_dict()


def copied(scene: Scene) -> None:
    copy.deepcopy(scene.here.optimizer)


def add_group(scene: Scene) -> None:
    scene.here.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def saliency(scene: Scene) -> None:
    """Make a backward pass that must not step."""
    here = scene.here
    buffers = [buffer.clone() for buffer in here.own.buffers()]
    x, y = here.batch()
    with here.optimizer.accumulate():
        here.loss_of(here.module, x, y).backward()
    here.optimizer.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(here.own.buffers(), buffers, strict=True):
            buffer.copy_(before)


def fail_and_load(scene: Scene) -> None:
    """Let a backward pass raise in its middle, and load what was saved before it, in the same process."""
    here = scene.here
    saved = copy.deepcopy([here.own.state_dict(), here.optimizer.state_dict()])
    x, y = here.batch()
    once_in(lambda scene: here.module.inner.weight.register_hook)(scene)
    try:
        here.loss_of(here.module, x, y).backward()
    except Injected:
        here.optimizer.zero_grad()
        here.own.load_state_dict(saved[0])
        here.optimizer.load_state_dict(saved[1])


def changes(name: str, act: Any, **options: Any) -> Fault:
    """Return a fault of all ranks that must be an error, after which the run is resumed."""
    given: dict[str, Any] = {"on": "all", "needs": "early", "steps": "any", "message": CHANGED, **options}
    return Fault(name, "refused", "gradients", act, **given)


def harmless(name: str, act: Any, at: Any = "gradients") -> Fault:
    """Return a fault of all ranks that must leave no trace."""
    return Fault(name, "unharmed", at, act, on="all", needs="early", steps="any")


FAULTS = [
    changes("clipping after the backward pass", lambda scene: clip(scene, 1e-3)),
    changes("a guard that clips nothing", lambda scene: clip(scene, 1e9)),
    changes("other gradients after the backward pass", replace_gradients),
    changes("one gradient is written after the backward pass", write_one_gradient),
    changes("no gradients after the backward pass", drop_gradients),
    changes("a learning rate after the backward pass", set_group("lr", 0.5)),
    changes("betas after the backward pass", set_group("betas", (0.5, 0.9))),
    harmless("moved parameters after the backward pass", move_parameters),
    harmless("state_dict in the middle of a step", refused(save, RuntimeError)),
    harmless("a copy in the middle of a step", refused(copied, RuntimeError)),
    harmless("a new group in the middle of a step", refused(add_group, RuntimeError)),
    harmless("a backward pass that must not step", saliency, at="forward"),
    harmless("a backward pass raises and a checkpoint is loaded", fail_and_load, at="forward"),
]  # fmt: skip
