"""Malformed calls of a stack: its constructor, losses, hyperparameters, states and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from tests.bad_input.rows import INF, NAN, Row, each, out_of_range, wrong_kinds

#: Made here, because the generator that it is initialised with must not change during a call.
COMPLEX = nn.Linear(1, 1, dtype=torch.cfloat)

WHOLE = "a whole number of at least 1"


def stacked(name: str) -> Callable[[Any, Any], object]:
    """Return a call that builds a stack with one argument replaced."""
    return lambda world, value: hk.ReplicaStack(**{"module": world.module, "replicas": 2, name: value})


def on_stack(rows: list[Row]) -> list[Row]:
    return [Row(row.name, row.call, row.error, row.message, "stack") for row in rows]


def backward(**arguments: Any) -> Callable[[Any], object]:
    return lambda w: w.stack.backward(w.loss, w.inputs, **arguments)


def with_batch(*batch: Any) -> Callable[[Any], object]:
    return lambda w: w.stack.backward(w.loss, *batch)


def set_hyper(world: Any, value: Any) -> None:
    world.stack.hyper["scale"] = value


def new_hyper(world: Any, value: Any) -> None:
    world.stack.hyper["another"] = value


def no_loss(world: Any) -> object:
    return world.stack.backward(lambda model, inputs: model(inputs), world.inputs)


STACKS: list[Row] = on_stack(
    [
        *wrong_kinds("replicas", stacked("replicas"), WHOLE),
        *out_of_range("replicas", stacked("replicas"), WHOLE, 0, -1, 2.5, NAN),
        *each(stacked("replicas"), ValueError, "at most 64 replicas of one process are averaged", 65, 1000, 10**9),
        *each(
            stacked("module"), TypeError, "a torch.nn.Module, got a ", None, 3, "model", nn.Linear, [], what="module "
        ),
        *each(
            stacked("gradients"),
            ValueError,
            "gradients must be one of 'shared', 'local'",
            "auto",
            None,
            True,
            what="gradients ",
        ),
        *each(
            stacked("ensemble"),
            TypeError,
            "ensemble must be an ensemble",
            3,
            "gloo",
            object(),
            RowEnsemble,
            what="ensemble ",
        ),
        *each(stacked("ensemble"), ValueError, "among must be processes that hold one whole replica", RowEnsemble(2)),
        *each(
            stacked("cuda_graphs"), ValueError, "cuda_graphs must be True or False", 1, "no", None, what="cuda_graphs "
        ),
        Row("a module without parameters", lambda w: hk.ReplicaStack(nn.ReLU(), 2), ValueError, "nothing to train"),
        Row("a meta module", lambda w: hk.ReplicaStack(nn.Linear(1, 1, device="meta"), 2), ValueError, "meta device"),
        Row(
            "a complex module",
            lambda w: hk.ReplicaStack(COMPLEX, 2),
            TypeError,
            "real floating",
        ),
        *each(
            lambda w, fn: w.stack.backward(fn, w.inputs),
            TypeError,
            "loss_fn must be callable as",
            None,
            3,
            "mse",
            what="loss_fn ",
        ),
        *each(
            lambda w, fn: w.stack.losses(fn, w.inputs),
            TypeError,
            "loss_fn must be callable as",
            None,
            torch.ones(2),
            what="losses ",
        ),
        Row("a loss that is no number", no_loss, ValueError, "one real number for each replica"),
        *wrong_kinds("chunk_size", lambda w, n: backward(chunk_size=n)(w), WHOLE, leave_out=["None"]),
        *out_of_range("chunk_size", lambda w, n: backward(chunk_size=n)(w), WHOLE, 0, -1, 1.5),
        *each(
            lambda w, same: backward(same_batch=same)(w), ValueError, "same_batch must be True or False", 1, "no", None
        ),
        Row("an odd batch", with_batch(torch.ones(7, 3)), ValueError, "7 is not divisible by 2"),
        Row("a meta batch", with_batch(torch.ones(8, 3, device="meta")), ValueError, "on the meta device"),
        Row("a sparse batch", with_batch(torch.ones(8, 3).to_sparse()), TypeError, "cannot be cut into slices"),
        Row("an array", with_batch(np.ones((8, 3), np.float32)), TypeError, "numpy array of shape"),
        Row(
            "another width",
            with_batch(torch.ones(8, 5)),
            RuntimeError,
            "shapes cannot be multiplied|size mismatch|must match",
        ),
        *each(
            lambda w, r: w.stack.replica(r),
            TypeError,
            "the number of a replica must be a whole number",
            None,
            "0",
            True,
        ),
        *each(lambda w, r: w.stack.replica(r), ValueError, "the number of a replica must be a whole number", 0.5, NAN),
        *each(lambda w, r: w.stack.replica(r), IndexError, "holds replicas 0 to 1, got", 2, -3, 10**30),
        *each(
            lambda w, s: w.stack.load_state_dict(s),
            TypeError,
            "state_dict must be a dict",
            None,
            [],
            "x",
            3,
            what="load ",
        ),
        *each(
            lambda w, s: w.stack.load_state_dict(s),
            RuntimeError,
            "does not fit a stack of 2",
            {},
            {"x": 1},
            what="load ",
        ),
        *each(lambda w, m: w.stack.train(m), ValueError, "boolean", "no", 3, None, what="train "),
        *each(
            set_hyper,
            TypeError,
            r"hyper\['scale'\] takes (real )?numbers",
            None,
            "0.5",
            True,
            [None, 1],
            ["a", "b"],
            1j,
            what="hyper ",
        ),
        *each(
            new_hyper,
            TypeError,
            r"hyper\['another'\] takes (real )?numbers",
            torch.ones(2, device="meta"),
            {},
            [[1], [1, 2]],
        ),
        *each(
            set_hyper,
            ValueError,
            r"hyper\['scale'\] takes one number or 2",
            [1.0, 2.0, 3.0],
            torch.ones(2, 2),
            [],
            what="hyper ",
        ),
        *each(
            new_hyper, ValueError, r"hyper\['another'\] takes finite numbers", NAN, INF, [1.0, NAN], torch.tensor(NAN)
        ),
        *each(
            lambda w, n: w.stack.hyper.set(n, 1.0),
            TypeError,
            "the name of a hyperparameter must be a text",
            None,
            3,
            what="hyper name ",
        ),
        Row("a hyper without a name", lambda w: w.stack.hyper.set("", 1.0), ValueError, "that is not empty"),
        Row(
            "an unknown hyper",
            lambda w: w.stack.hyper["smoothing"],
            KeyError,
            r"not a hyperparameter .* Explore\('smoothing'",
        ),
        *each(
            lambda w, data: hk.StackedParameter(data),
            TypeError,
            "data must be a tensor",
            None,
            [1.0],
            3,
            what="parameter ",
        ),
        Row(
            "a parameter without rows", lambda w: hk.StackedParameter(torch.ones(())), ValueError, "without dimensions"
        ),
        Row("shares_gradient", lambda w: hk.StackedParameter(torch.ones(2), "no"), ValueError, "True or False"),
    ]
)

AREAS = {"stacks": STACKS}
