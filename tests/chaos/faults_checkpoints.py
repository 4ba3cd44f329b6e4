"""Checkpoints that are damaged, of another run, older than those of the other ranks, or loaded in another order."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import torch

from tests.chaos.faults import Fault, Scene, traits
from tests.chaos.replica import PARTS


def damaged(cut: Callable[[bytes, Scene], bytes]) -> Callable[[Scene], None]:
    """Read the file again after its bytes were changed."""

    def act(scene: Scene) -> None:
        whole = (scene.folder / f"good{scene.rank}.pt").read_bytes()
        scene.states = torch.load(io.BytesIO(cut(whole, scene)), weights_only=True)

    return act


def half(whole: bytes, scene: Scene) -> bytes:
    return whole[: scene.random.randrange(1, len(whole) - 1)]


def noise(whole: bytes, scene: Scene) -> bytes:
    return scene.random.randbytes(len(whole))


def hdet(edit: Callable[[dict[str, Any], Scene], None]) -> Callable[[Scene], None]:
    """Edit the scheduler's own part of the checkpoint, and load that alone: the error must be the scheduler's."""

    def act(scene: Scene) -> None:
        scene.states = copy.deepcopy(scene.states)
        edit(scene.states["scheduler"]["hdet"][0], scene)
        scene.order = ("scheduler",)

    return act


def value(key: str, wrong: Any) -> Callable[[Scene], None]:
    return hdet(lambda state, scene: state.update({key: wrong}))


def drop(state: dict[str, Any], scene: Scene) -> None:
    # A state without "format" is one of version 0.1.
    del state[scene.random.choice([key for key in state if key != "format"])]


def wrong_type(state: dict[str, Any], scene: Scene) -> None:
    keys = ("config", "size", "replica", "rows", "step", "spread", "window", "history", "begun")
    state[scene.random.choice([key for key in keys if key in state])] = scene.random.choice([object, "x", [None], 1j])


def drop_inner(state: dict[str, Any], scene: Scene) -> None:
    inner = state[scene.random.choice(["spread", "window"])]
    del inner[scene.random.choice(list(inner))]


def another_config(state: dict[str, Any], scene: Scene) -> None:
    config = state["config"] = dict(state["config"])
    config[scene.random.choice(["sync_every", "total_steps", "seed"])] = 77


def optimizer_alone(edit: Callable[[dict[str, Any], Scene], None]) -> Callable[[Scene], None]:
    """Edit the state of the optimizer, and load that alone."""

    def act(scene: Scene) -> None:
        scene.states = copy.deepcopy(scene.states)
        edit(scene.states["optimizer"], scene)
        scene.order = ("optimizer",)

    return act


def drop_moment(state: dict[str, Any], scene: Scene) -> None:
    for entry in state["state"].values():
        del entry["exp_avg_sq"]


def of_sgd(state: dict[str, Any], scene: Scene) -> None:
    for entry in state["state"].values():
        entry["momentum_buffer"] = entry.pop("exp_avg")
        del entry["exp_avg_sq"]


def another_shape(state: dict[str, Any], scene: Scene) -> None:
    for entry in state["state"].values():
        entry["exp_avg"] = torch.zeros(3)


def one_group_more(state: dict[str, Any], scene: Scene) -> None:
    state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))


def plain_scheduler(scene: Scene) -> None:
    """Load the state of torch's own OneCycleLR."""
    scene.states = {**scene.states, "scheduler": {k: v for k, v in scene.states["scheduler"].items() if k != "hdet"}}
    scene.order = ("scheduler",)


def older(*parts: str) -> Callable[[Scene], None]:
    """Load these parts from the older checkpoint."""

    def act(scene: Scene) -> None:
        scene.states = {name: (scene.older if name in parts else scene.states)[name] for name in PARTS}

    return act


def nothing(scene: Scene) -> None:
    """Start from the beginning where the others resume."""
    scene.states = {}


def another_order(scene: Scene) -> None:
    orders = list(itertools.permutations(PARTS))[1:]
    scene.order = orders[scene.case.pick % len(orders)]


def twice(scene: Scene) -> None:
    scene.here.load(copy.deepcopy(scene.states))


def after_another(scene: Scene) -> None:
    """Load an older checkpoint first, then the right one."""
    scene.here.load(scene.older)


def rejected(name: str, act: Callable[[Scene], None], message: str = "", **options: Any) -> Fault:
    return Fault(name, "rejected", "load", act, message=message, then="go on", **options)


OURS = traits("ours")
STALE = r"disagree on .*{who}"

FAULTS = [
    rejected("checkpoint cut off", damaged(half)),
    rejected("checkpoint of random bytes", damaged(noise)),
    rejected("empty checkpoint", damaged(lambda whole, scene: b"")),
    rejected("scheduler's state lacks a field", hdet(drop)),
    rejected("scheduler's state lacks an inner field", hdet(drop_inner)),
    rejected("scheduler's state has a wrong type", hdet(wrong_type)),
    rejected("step of -1", value("step", -1), "-1"),
    rejected("step of 7.5", value("step", 7.5), r"7\.5"),
    rejected("step of a text", value("step", "x"), "x"),
    rejected("step of nan", value("step", float("nan")), "nan"),
    rejected("step past the end", value("step", 99), "99"),
    rejected("replicas as a text", value("size", "two"), "two"),
    rejected("history of numbers", value("history", [1, 2, 3])),
    rejected("format of a newer version", value("format", 99), "99"),
    rejected("field of a newer version", value("tomorrow", 1), "tomorrow"),
    rejected("checkpoint of other settings", hdet(another_config), "77"),
    rejected("checkpoint of torch's scheduler", plain_scheduler, "HDET|hdet"),
    rejected("optimizer's state lacks a moment", optimizer_alone(drop_moment), "exp_avg_sq", needs=OURS),
    rejected("optimizer's state of SGD", optimizer_alone(of_sgd), "exp_avg", needs=OURS),
    rejected("moment of another shape", optimizer_alone(another_shape), needs=OURS),
    rejected("one parameter group more", optimizer_alone(one_group_more), needs=OURS),
    Fault("back from an older checkpoint", "refused", "load", older(*PARTS), message=STALE, without=traits("shared")),
    Fault("scheduler from an older checkpoint", "refused", "load", older("scheduler"), message=STALE,
          without=traits("shared")),
    Fault("back from the beginning", "refused", "load", nothing, message=STALE, without=traits("shared")),
    Fault("all back from an older checkpoint", "unharmed", "load", older(*PARTS), on="all"),
    Fault("parts in another order", "unharmed", "load", another_order),
    Fault("all parts in another order", "unharmed", "load", another_order, on="all"),
    Fault("loaded twice", "unharmed", "load", twice),
    Fault("loaded after another one", "unharmed", "load", after_another),
]  # fmt: skip
