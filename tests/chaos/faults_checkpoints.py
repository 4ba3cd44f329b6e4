"""Checkpoints that are damaged, of another run, older than those of the other ranks, or loaded in another order."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import torch

from hdet_kernels.schedule.checkpoint import CycleState
from tests.chaos.faults import Fault, Scene
from tests.chaos.replica import PARTS


def damaged(cut: Callable[[bytes, Scene], bytes]) -> Callable[[Scene], None]:
    """Read the file again after its bytes were changed."""

    def act(scene: Scene) -> None:
        whole = (scene.folder / f"good{scene.rank}.pt").read_bytes()
        scene.states = torch.load(io.BytesIO(cut(whole, scene)), weights_only=True)

    return act


def edited(part: str, edit: Callable[[dict[str, Any], Scene], Any]) -> Callable[[Scene], None]:
    """Edit one part of the checkpoint, and load that alone: the error must be of that part."""

    def act(scene: Scene) -> None:
        scene.states, scene.order = copy.deepcopy(scene.states), (part,)
        edit(scene.states[part], scene)

    return act


def hdet(edit: Callable[[dict[str, Any], Scene], Any]) -> Callable[[Scene], None]:
    """Edit the scheduler's own state."""
    return edited("scheduler", lambda state, scene: edit(state["hdet"][0], scene))


def drop(state: dict[str, Any], scene: Scene) -> None:
    # A state without "format" is one of version 0.1; those with a default are not in the first files of 0.2.0.
    needed = [field.name for field in fields(CycleState) if field.default is MISSING and field.name != "format"]
    del state[scene.random.choice(needed)]


def drop_inner(state: dict[str, Any], scene: Scene) -> None:
    inner = state[scene.random.choice(["spread", "window"])]
    del inner[scene.random.choice(list(inner))]


def wrong_type(state: dict[str, Any], scene: Scene) -> None:
    keys = ("config", "size", "replica", "rows", "step", "spread", "window", "history", "begun")
    state[scene.random.choice([key for key in keys if key in state])] = scene.random.choice([object, "x", [None], 1j])


def another_config(state: dict[str, Any], scene: Scene) -> None:
    state["config"] = {**state["config"], scene.random.choice(["sync_every", "total_steps", "seed"]): 77}


def entries(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Scene], None]:
    """Edit the state of every parameter in the state of the optimizer."""
    return edited("optimizer", lambda state, scene: [edit(entry) for entry in state["state"].values()])


def of_sgd(entry: dict[str, Any]) -> None:
    entry["momentum_buffer"] = entry.pop("exp_avg")
    del entry["exp_avg_sq"]


def one_group_more(state: dict[str, Any], scene: Scene) -> None:
    state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))


def older(*parts: str) -> Callable[[Scene], None]:
    """Load these parts from the older checkpoint."""

    def act(scene: Scene) -> None:
        scene.states = {name: (scene.older if name in parts else scene.states)[name] for name in PARTS}

    return act


def another_order(scene: Scene) -> None:
    orders = list(itertools.permutations(PARTS))[1:]
    scene.order = orders[scene.case.pick % len(orders)]


def rejected(name: str, act: Callable[[Scene], None], message: str = "", **options: Any) -> Fault:
    return Fault(name, "rejected", "load", act, message=message, then="go on", **options)


def value(name: str, key: str, wrong: Any, message: str = "") -> Fault:
    return rejected(name, hdet(lambda state, scene: state.update({key: wrong})), message)


def stale(name: str, act: Callable[[Scene], None]) -> Fault:
    return Fault(name, "refused", "load", act, message=r"disagree on .*{who}", without="shared")


FAULTS = [
    rejected("checkpoint cut off", damaged(lambda whole, scene: whole[: scene.random.randrange(1, len(whole) - 1)])),
    rejected("checkpoint of random bytes", damaged(lambda whole, scene: scene.random.randbytes(len(whole)))),
    rejected("empty checkpoint", damaged(lambda whole, scene: b"")),
    rejected("scheduler's state lacks a field", hdet(drop)),
    rejected("scheduler's state lacks an inner field", hdet(drop_inner)),
    rejected("scheduler's state has a wrong type", hdet(wrong_type)),
    value("step of -1", "step", -1, "-1"),
    value("step of 7.5", "step", 7.5, r"7\.5"),
    value("step of a text", "step", "x", "x"),
    value("step of nan", "step", float("nan"), "nan"),
    value("step past the end", "step", 99, "99"),
    value("replicas as a text", "size", "two", "two"),
    value("history of numbers", "history", [1, 2, 3]),
    value("format of a newer version", "format", 99, "99"),
    value("field of a newer version", "tomorrow", 1, "tomorrow"),
    rejected("checkpoint of other settings", hdet(another_config), "77"),
    rejected("checkpoint of torch's scheduler", edited("scheduler", lambda state, _: state.pop("hdet")), "HDET|hdet"),
    rejected("optimizer's state lacks a moment", entries(lambda entry: entry.pop("exp_avg_sq")), "exp_avg_sq",
             needs="ours"),
    rejected("optimizer's state of SGD", entries(of_sgd), "exp_avg", needs="ours"),
    rejected("moment of another shape", entries(lambda entry: entry.update(exp_avg=torch.zeros(3))), needs="ours"),
    rejected("one parameter group more", edited("optimizer", one_group_more), needs="ours"),
    stale("back from an older checkpoint", older(*PARTS)),
    stale("scheduler from an older checkpoint", older("scheduler")),
    stale("back from the beginning", lambda scene: scene.states.clear()),
    Fault("all back from an older checkpoint", "unharmed", "load", older(*PARTS), on="all"),
    Fault("parts in another order", "unharmed", "load", another_order),
    Fault("all parts in another order", "unharmed", "load", another_order, on="all"),
    Fault("loaded twice", "unharmed", "load", lambda scene: scene.here.load(copy.deepcopy(scene.states))),
    Fault("loaded after another one", "unharmed", "load", lambda scene: scene.here.load(scene.older)),
]  # fmt: skip
