"""Malformed calls of a stack: its constructor, losses, hyperparameters, states and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from tests.bad_input.rows import INF, NAN, Row, built, flags, method, named, number, optional, refused

#: Made here, because the generator that it is initialised with must not change during a call.
COMPLEX = nn.Linear(1, 1, dtype=torch.cfloat)


def stack(world: Any, **keywords: Any) -> object:
    return hk.ReplicaStack(**{"module": world.module, "replicas": 2, **keywords})


def backward(world: Any, **keywords: Any) -> object:
    given = {"loss_fn": world.loss, "batch": world.inputs, **keywords}
    return world.stack.backward(given.pop("loss_fn"), given.pop("batch"), **given)


replica, load = method("stack.replica"), method("stack.load_state_dict")
parameter = built(hk.StackedParameter, data=torch.ones(2))


def hyper(world: Any, **keyword: Any) -> None:
    for name, value in keyword.items():
        world.stack.hyper[name] = value


def hyper_name(world: Any, name: Any) -> None:
    world.stack.hyper[name] = 1.0


STACKS: list[Row] = [
    *number(stack, "replicas", 0, -1, 2.5, NAN, 65, 10**9),
    *refused(stack, "module", TypeError, None, 3, "model", nn.Linear, [], argument="Module"),
    *refused(stack, "module", TypeError, COMPLEX, argument="real"),
    *refused(stack, "module", ValueError, nn.ReLU(), argument="train"),
    *refused(stack, "module", ValueError, nn.Linear(1, 1, device="meta"), argument="meta device"),
    *refused(stack, "gradients", ValueError, "auto", None, True),
    *refused(stack, "ensemble", TypeError, 3, "gloo", object(), RowEnsemble),
    *refused(stack, "ensemble", ValueError, RowEnsemble(2), argument="among"),
    *flags(stack, "cuda_graphs"),
    *refused(backward, "loss_fn", TypeError, None, 3, "mse"),
    *refused(backward, "loss_fn", ValueError, lambda model, inputs: model(inputs), argument="each replica"),
    *optional(backward, "chunk_size", 0, -1, 1.5),
    *flags(backward, "same_batch"),
    *refused(backward, "batch", ValueError, torch.ones(7, 3), argument="divisible"),
    *refused(backward, "batch", ValueError, torch.ones(8, 3, device="meta"), argument="meta device"),
    *refused(backward, "batch", TypeError, torch.ones(8, 3).to_sparse(), argument="slices"),
    *refused(backward, "batch", TypeError, np.ones((8, 3), np.float32), argument="numpy array"),
    *refused(backward, "batch", RuntimeError, torch.ones(8, 5), argument="multiplied"),
    *named("losses", refused(method("stack.losses"), "loss_fn", TypeError, None, torch.ones(2))),
    *refused(replica, "number", TypeError, None, "0", True, argument="replica"),
    *refused(replica, "number", ValueError, 0.5, NAN, argument="replica"),
    *refused(replica, "number", IndexError, 2, -3, 10**30, argument="replica"),
    *refused(load, "state_dict", TypeError, None, [], "x", 3),
    *refused(load, "state_dict", RuntimeError, {}, {"x": 1}, argument="stack of 2"),
    *refused(method("stack.train"), "mode", ValueError, "no", 3, None, argument="boolean"),
    *refused(hyper, "scale", TypeError, None, "0.5", True, [None, 1], ["a", "b"], 1j, {}),
    *refused(hyper, "scale", ValueError, [1.0, 2.0, 3.0], torch.ones(2, 2), []),
    *refused(hyper, "another", TypeError, torch.ones(2, device="meta"), [[1], [1, 2]], np.ma.masked),
    *refused(hyper, "another", TypeError, torch.ones(2).to_sparse(), [nn.Parameter(torch.ones(2))] * 2),
    *refused(hyper, "another", ValueError, NAN, INF, [1.0, NAN], torch.tensor(NAN)),
    *refused(hyper_name, "name", TypeError, None, 3),
    *refused(hyper_name, "name", ValueError, ""),
    Row("an unknown hyper", lambda w: w.stack.hyper["smoothing"], KeyError, "smoothing"),
    Row("a list of hypers", lambda w: w.stack.hyper[["scale"]], KeyError, "is not a hyperparameter"),
    *refused(parameter, "data", TypeError, None, [1.0], 3),
    *refused(parameter, "data", ValueError, torch.ones(()), torch.ones(2).to_sparse(), torch.ones(2).int()),
    *flags(parameter, "shares_gradient"),
]

AREAS = {"stacks": named("stack", STACKS, "stack")}
