"""Errors in what the user wrote (forward, probe, setter, optimizer, losses), and calls at the wrong moment."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.chaos.faults import Fault, Injected, Scene, traits
from tests.chaos.faults_processes import (
    in_probe,
    in_setter,
    interrupt,
    raise_in_loss,
    raise_injected,
    run_out_of_memory,
)


def in_backward(scene: Scene) -> None:
    """Raise in a hook of a gradient."""
    first = scene.here.parameters()[0][1]
    act = scene.once(raise_injected)

    def hook(gradient: Any) -> None:
        handle.remove()
        act()

    handle = first.register_hook(hook)


def in_optimizer(post: bool) -> Callable[[Scene], None]:
    """Raise in a hook of the optimizer."""

    def arm(scene: Scene) -> None:
        act = scene.once(raise_injected)

        def hook(*args: Any) -> None:
            handle.remove()
            act()

        optimizer = scene.here.optimizer
        handle = (optimizer.register_step_post_hook if post else optimizer.register_step_pre_hook)(hook)

    return arm


def in_closure(scene: Scene) -> None:
    """Raise in a closure that is passed to ``optimizer.step``."""
    with contextlib.suppress(Injected):
        scene.here.optimizer.step(raise_injected)


def loss(value: Any) -> Callable[[Scene], None]:
    """Pass something else for the loss."""

    def act(scene: Scene) -> None:
        scene.loss = value

    return act


def probe(value: Any) -> Callable[[Scene], None]:
    """Let the probe return something else, once."""

    def arm(scene: Scene) -> None:
        scene.here.in_probe = scene.once(lambda: value)

    return arm


def refused(call: Callable[[Scene], Any], *errors: type[Exception]) -> Callable[[Scene], None]:
    """Make a call that must be refused with everything as before, on all ranks."""

    def act(scene: Scene) -> None:
        before = scene.here.digests(gradients=True)
        try:
            call(scene)
        except errors:
            after = scene.here.digests(gradients=True)
            changed = [name for name in before if before[name] != after[name]]
            if changed:
                raise AssertionError(f"{changed} changed by a call that was refused") from None
            return
        raise AssertionError("a call that makes no sense was not refused")

    return act


def step_in_consensus(scene: Scene) -> None:
    with scene.here.scheduler.consensus():
        scene.here.scheduler.step(1.0)


def converge_in_consensus(scene: Scene) -> None:
    with scene.here.scheduler.consensus():
        scene.here.scheduler.converge()


def consensus_in_consensus(scene: Scene) -> None:
    with scene.here.scheduler.consensus(), scene.here.scheduler.consensus():
        pass


def raise_in_consensus(scene: Scene) -> None:
    with scene.here.scheduler.consensus():
        for _, param in scene.here.parameters():
            param.detach().zero_()
        raise_injected()


def consensus(scene: Scene) -> None:
    """Evaluate and save the averaged model, which must leave no trace."""
    before = scene.here.digests()
    with scene.here.scheduler.consensus():
        scene.here.own.state_dict()
    assert scene.here.digests() == before


def step_again_past_the_end(scene: Scene) -> None:
    scene.here.scheduler.step(1.0)


def new_group(scene: Scene) -> None:
    """Add a parameter group while the schedule is running, and take it back when the scheduler has refused it."""
    optimizer = scene.here.optimizer
    extra = {"params": [], "lr": 0.1}
    optimizer.param_groups.append(extra)
    try:
        scene.here.scheduler.step(scene.loss)
    finally:
        optimizer.param_groups.remove(extra)


def converge_alone(scene: Scene) -> None:
    scene.here.scheduler.converge()


def step_twice(scene: Scene) -> None:
    """Step the scheduler once more than the optimizer."""
    scene.here.scheduler.step(scene.loss)


def forget_losses(scene: Scene) -> None:
    """Pass no loss and let none have been recorded since the last sync."""
    scene.here.scheduler.cycle.window.clear()
    scene.loss = None


def move_base(scene: Scene) -> None:
    """Let the schedule of one rank go on from another learning rate."""
    for group in scene.here.optimizer.param_groups:
        for key in ("initial_lr", "max_lr", "min_lr"):
            group[key] = group[key] * 1.5


def hold_reference(scene: Scene) -> None:
    nn.utils.clip_grad_norm_([param for _, param in scene.here.parameters()], 1e9)


FAULTS = [
    Fault("forward raises once", "unharmed", "forward", raise_in_loss(Injected), then="retry", steps="any", late=True),
    Fault("forward runs out of memory once", "unharmed", "forward", raise_in_loss(MemoryError), then="retry",
          steps="any", late=True),
    Fault("backward raises once", "unharmed", "forward", in_backward, then="retry", steps="any", late=True,
          without=traits("shared")),
    Fault("optimizer raises before its step", "unharmed", "gradients", in_optimizer(post=False), then="retry",
          steps="any", late=True),
    Fault("optimizer raises after its step", "unharmed", "gradients", in_optimizer(post=True), then="go on",
          steps="any", late=True),
    Fault("closure raises", "unharmed", "gradients", in_closure, steps="any"),
    Fault("probe raises", "refused", "sync", in_probe(raise_injected), then="retry", needs=traits("probe"),
          steps="inner", late=True, message=r"probe\(\) raised on {who}"),
    Fault("probe runs out of memory", "refused", "sync", in_probe(run_out_of_memory), then="retry",
          needs=traits("probe"), steps="inner", late=True, message=r"probe\(\) raised on {who}"),
    Fault("probe returns a text", "refused", "sync", probe("low"), then="retry", needs=traits("probe"),
          steps="inner", late=True, message=r"probe\(\) raised on {who}"),
    Fault("probe returns several losses", "refused", "sync", probe(torch.ones(7)), then="retry",
          needs=traits("probe"), steps="inner", late=True, message=r"probe\(\) raised on {who}"),
    Fault("interrupted in the probe", "lost", "sync", in_probe(interrupt), then="leave", needs=traits("probe"),
          steps="inner", late=True),
    Fault("setter raises", "unharmed", "sync", in_setter(raise_injected), then="go on", needs=traits("setter"),
          steps="inner", late=True),
    Fault("setter raises on all ranks", "unharmed", "sync", in_setter(raise_injected), then="go on", on="all",
          needs=traits("setter"), steps="inner", late=True),
    Fault("a text as loss", "unharmed", "sync", loss("low"), then="retry", steps="any"),
    Fault("several losses for one", "unharmed", "sync", loss(torch.ones(7)), then="retry", steps="any"),
    Fault("a complex loss", "unharmed", "sync", loss(torch.tensor(1j)), then="retry", steps="any"),
    Fault("an empty loss", "unharmed", "sync", loss(torch.ones(0)), then="retry", steps="any"),
    Fault("a meta tensor as loss", "unharmed", "sync", loss(torch.ones((), device="meta")), then="retry", steps="any"),
    Fault("no loss since the last sync", "refused", "sync", forget_losses, without=traits("probe"), steps="inner",
          message=r"no loss was recorded since the last sync on {who}"),
    Fault("step in consensus", "unharmed", "update", refused(step_in_consensus, RuntimeError), on="all", steps="any"),
    Fault("converge in consensus", "unharmed", "update", refused(converge_in_consensus, RuntimeError), on="all",
          steps="any"),
    Fault("consensus in consensus", "unharmed", "update", refused(consensus_in_consensus, RuntimeError), on="all",
          steps="any"),
    Fault("error in consensus", "unharmed", "update", refused(raise_in_consensus, Injected), on="all", steps="any"),
    Fault("consensus leaves no trace", "unharmed", "update", consensus, on="all", steps="any"),
    Fault("a copy of the scheduler", "unharmed", "update",
          refused(lambda scene: pickle.dumps(scene.here.scheduler), TypeError), steps="any"),
    Fault("a new parameter group", "unharmed", "update", refused(new_group, RuntimeError), steps="any"),
    Fault("clipping without effect", "unharmed", "gradients", hold_reference, steps="any",
          without=traits("stack sharded")),
    Fault("converge alone", "refused", "after", converge_alone, needs=traits("local"), without=traits("overlap"),
          steps="inner", message=r"disagree on .*{who}"),
    Fault("converge alone after the last step", "unharmed", "after", converge_alone, then="go on", steps="last",
          waits=True, message=r"rank \d did not come"),
    Fault("one step more", "unharmed", "after", refused(step_twice, RuntimeError), without=traits("sharded"),
          steps="inner"),
    Fault("another base value", "refused", "update", move_base, steps="inner",
          message=r"disagree on the base values .*{who}"),
]  # fmt: skip
