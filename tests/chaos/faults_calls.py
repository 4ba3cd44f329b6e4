"""Errors in what the user wrote (forward, probe, setter, optimizer, losses), and calls at the wrong moment."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.chaos.faults import Fault, Injected, Scene
from tests.chaos.faults_processes import INJECTED, INTERRUPT, OUT_OF_MEMORY, inside, raise_in_loss


def once_in(register: Callable[[Scene], Callable[[Any], Any]]) -> Callable[[Scene], None]:
    """Raise in a hook, which is registered with this, the first time that it is called."""

    def arm(scene: Scene) -> None:
        act = scene.once(INJECTED)

        def hook(*args: Any) -> None:
            handle.remove()
            act()

        handle = register(scene)(hook)

    return arm


def in_closure(scene: Scene) -> None:
    """Raise in a closure that is passed to ``optimizer.step``."""
    with contextlib.suppress(Injected):
        scene.here.optimizer.step(INJECTED)


def loss(value: Any) -> Callable[[Scene], None]:
    """Pass something else for the loss."""
    return lambda scene: setattr(scene, "loss", value)


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


def in_consensus(act: Callable[..., Any]) -> Callable[[Scene], None]:
    """Act while the averaged model is in the place of the replicas."""

    def acts(scene: Scene) -> None:
        with scene.here.scheduler.consensus():
            act(scene)

    return acts


def step_again(scene: Scene) -> None:
    """Step the scheduler once more than the optimizer."""
    scene.here.scheduler.step(scene.loss)


def converge(scene: Scene) -> None:
    scene.here.scheduler.converge()


def spoil_and_raise(scene: Scene) -> None:
    for _, param in scene.here.parameters():
        param.detach().zero_()
    INJECTED()


def consensus(scene: Scene) -> None:
    """Evaluate and save the averaged model, which must leave no trace."""
    before = scene.here.digests()
    with scene.here.scheduler.consensus():
        scene.here.own.state_dict()
    assert scene.here.digests() == before


def new_group(scene: Scene) -> None:
    """Add a parameter group while the schedule is running, and take it back when the scheduler has refused it."""
    optimizer = scene.here.optimizer
    extra = {"params": [], "lr": 0.1}
    optimizer.param_groups.append(extra)
    try:
        scene.here.scheduler.step(scene.loss)
    finally:
        optimizer.param_groups.remove(extra)


def forget_losses(scene: Scene) -> None:
    """Pass no loss and let none have been recorded since the last sync."""
    scene.here.scheduler.cycle.window.clear()
    scene.loss = None


def move_base(scene: Scene) -> None:
    """Let the schedule of one rank go on from another learning rate."""
    for group in scene.here.optimizer.param_groups:
        for key in ("initial_lr", "max_lr", "min_lr"):
            group[key] = group[key] * 1.5


def clip_nothing(scene: Scene) -> None:
    nn.utils.clip_grad_norm_([param for _, param in scene.here.parameters()], 1e9)


def in_probe(name: str, act: Callable[[], Any]) -> Fault:
    return Fault(name, "refused", "sync", inside("in_probe", act), then="retry", needs="probe", steps="inner",
                 late=True, message=r"probe\(\) raised on {who}")  # fmt: skip


def raises(name: str, at: Any, act: Callable[[Scene], None], **options: Any) -> Fault:
    """Return a fault that raises in what the user wrote, where the call is then repeated."""
    return Fault(name, "unharmed", at, act, steps="any", late=True, **{"then": "retry", **options})


def wrong_loss(name: str, value: Any) -> Fault:
    return Fault(name, "unharmed", "sync", loss(value), then="retry", steps="any")


def everywhere(name: str, act: Callable[[Scene], None]) -> Fault:
    """Return a fault of all ranks that leaves no trace."""
    return Fault(name, "unharmed", "update", act, on="all", steps="any")


FAULTS = [
    raises("forward raises once", "forward", raise_in_loss(Injected)),
    raises("forward runs out of memory once", "forward", raise_in_loss(MemoryError)),
    raises("backward raises once", "forward", once_in(lambda scene: scene.here.parameters()[0][1].register_hook),
           without="shared early"),
    raises("optimizer raises before its step", "gradients",
           once_in(lambda scene: scene.here.optimizer.register_step_pre_hook), without="early"),
    raises("optimizer raises after its step", "gradients",
           once_in(lambda scene: scene.here.optimizer.register_step_post_hook), then="go on"),
    Fault("closure raises", "unharmed", "gradients", in_closure, steps="any"),
    in_probe("probe raises", INJECTED),
    in_probe("probe runs out of memory", OUT_OF_MEMORY),
    in_probe("probe returns a text", lambda: "low"),
    in_probe("probe returns several losses", lambda: torch.ones(7)),
    Fault("interrupted in the probe", "lost", "sync", inside("in_probe", INTERRUPT), then="leave", needs="probe",
          steps="inner", late=True),
    Fault("setter raises", "unharmed", "sync", inside("in_setter", INJECTED), then="go on", needs="setter",
          steps="inner", late=True),
    Fault("setter raises on all ranks", "unharmed", "sync", inside("in_setter", INJECTED), then="go on", on="all",
          needs="setter", steps="inner", late=True),
    wrong_loss("a text as loss", "low"),
    wrong_loss("several losses for one", torch.ones(7)),
    wrong_loss("a complex loss", torch.tensor(1j)),
    wrong_loss("an empty loss", torch.ones(0)),
    wrong_loss("a meta tensor as loss", torch.ones((), device="meta")),
    Fault("no loss since the last sync", "refused", "sync", forget_losses, without="probe", steps="inner",
          message=r"no loss was recorded since the last sync on {who}"),
    everywhere("step in consensus", refused(in_consensus(step_again), RuntimeError)),
    everywhere("converge in consensus", refused(in_consensus(converge), RuntimeError)),
    everywhere("consensus in consensus", refused(in_consensus(in_consensus(step_again)), RuntimeError)),
    everywhere("error in consensus", refused(in_consensus(spoil_and_raise), Injected)),
    everywhere("consensus leaves no trace", consensus),
    Fault("a copy of the scheduler", "unharmed", "update",
          refused(lambda scene: pickle.dumps(scene.here.scheduler), TypeError), steps="any"),
    Fault("a new parameter group", "unharmed", "update", refused(new_group, RuntimeError), steps="any"),
    Fault("clipping without effect", "unharmed", "gradients", clip_nothing, steps="any",
          without="stack sharded early"),
    Fault("converge alone", "refused", "after", converge, needs="local", without="overlap", steps="inner",
          message=r"disagree on .*{who}"),
    Fault("converge alone after the last step", "unharmed", "after", converge, then="go on", steps="last", waits=True,
          message=r"rank \d did not come"),
    # It is noticed by the gradient, which is that of the step before.
    Fault("one step more", "unharmed", "after", refused(step_again, RuntimeError), without="sharded early",
          steps="inner"),
    Fault("another base value", "refused", "update", move_base, steps="inner",
          message=r"disagree on the base values .*{who}"),
]  # fmt: skip
