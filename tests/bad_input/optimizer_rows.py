"""Malformed calls of the fused optimizers: parameters, hyperparameters, options, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet_kernels as hk
from tests.bad_input.rows import INF, NAN, NOT_NUMBERS, Row

BOTH = (TypeError, ValueError)

#: Numbers of each optimizer, and values that none of them takes.
NUMBERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[Any, ...]]] = {
    "lr": (hk.FusedAdamW, (-1e-3, NAN, INF, -INF)),
    "eps": (hk.FusedAdamW, (-1e-8, NAN, INF)),
    "weight_decay": (hk.FusedLion, (-0.1, NAN, INF)),
    "momentum": (hk.FusedSGD, (-0.9, NAN, INF)),
    "dampening": (hk.FusedSGD, (NAN, INF)),
    "lr_decay": (hk.FusedAdagrad, (-0.1, NAN, INF)),
    "initial_accumulator_value": (hk.FusedAdagrad, (-0.1, NAN, INF)),
    "max_grad_norm": (hk.FusedAdamW, (0, 0.0, -1.0, NAN, -INF)),
}


def build(kind: Any = hk.FusedAdamW, **arguments: Any) -> Callable[[Any], object]:
    """Return a call that builds an optimizer over the parameters of the untouched model."""
    return lambda world: kind(world.bare_model.parameters(), **arguments)


def over(params: Callable[[Any], Any], kind: Any = hk.FusedAdamW) -> Callable[[Any], object]:
    """Return a call that builds an optimizer over other parameters."""
    return lambda world: kind(params(world))


def group(**entries: Any) -> Callable[[Any], object]:
    """Return a call that adds a parameter group to the trained optimizer."""
    return lambda world: world.optimizer.add_param_group({"params": list(world.bare_model.parameters()), **entries})


def rows_of(name: str, kind: Any, values: tuple[Any, ...]) -> list[Row]:
    # torch takes learning rates as tensors of one element, also where their values are not known yet.
    kinds = {kind_: value for kind_, (value, _) in NOT_NUMBERS.items() if kind_ != "a meta tensor"}
    if name == "max_grad_norm":
        kinds.pop("None")
    return [
        *(Row(f"{name} is {what}", build(kind, **{name: value}), BOTH, f"{name}") for what, value in kinds.items()),
        *(
            Row(f"{name}={value}", build(kind, **{name: value}), BOTH, rf"{name} must .* got {value}")
            for value in values
        ),
    ]


def parameter(*shape: int, **options: Any) -> nn.Parameter:
    grad = options.pop("grad", True)
    return nn.Parameter(torch.ones(shape, **options), requires_grad=grad)


KEYWORDS: list[Row] = [
    *(row for name, (kind, values) in NUMBERS.items() for row in rows_of(name, kind, values)),
    *(
        Row(f"{kind.__name__} betas={betas!r}", build(kind, betas=betas), BOTH, "betas must ")
        for kind in (hk.FusedAdam, hk.FusedLion)
        for betas in (
            None,
            0.9,
            (),
            (0.9,),
            (0.9, 0.99, 0.999),
            (-0.1, 0.9),
            (0.9, 1.0),
            (NAN, 0.9),
            ("a", "b"),
            (True, 0.9),
        )
    ),
    *(
        Row(f"{name}={value!r}", build(**{name: value}), BOTH, f"{name} must be ")
        for name in ("amsgrad", "maximize", "stochastic_rounding", "master_weights")
        for value in ("no", 2, [], 0.5)
    ),
    *(
        Row(f"nesterov={value!r}", build(hk.FusedSGD, nesterov=value), BOTH, "nesterov must be ")
        for value in ("no", None, 2)
    ),
    Row("nesterov without momentum", build(hk.FusedSGD, nesterov=True), ValueError, "nesterov=True needs momentum"),
    *(
        Row(f"gradients={value!r}", build(gradients=value), ValueError, "gradients must be one of 'autograd', 'fixed'")
        for value in ("shared", None, True, 3)
    ),
    *(
        Row(f"state_dtype={value!r}", build(state_dtype=value), BOTH, "state_dtype must be ")
        for value in (torch.float16, torch.uint8, None, "bf16", "uint8", float)
    ),
    Row("masters and rounding", build(master_weights=True, stochastic_rounding=True), ValueError, "exclude each other"),
    *(
        Row(f"backend={value!r}", build(backend=value), BOTH, "unknown backend|backend must be")
        for value in ("cudnn", "", 3, ["torch"])
    ),
    Row("an unknown keyword", build(momentun=0.9), TypeError, "unexpected keyword argument 'momentun'"),
]


def two_groups(world: Any) -> Any:
    weight = world.bare_model[0].weight
    return [{"params": [weight]}, {"params": [weight]}]


def half_shared(world: Any) -> Any:
    memory = torch.ones(6)
    return [nn.Parameter(memory[:4]), nn.Parameter(memory[2:])]


def plain_and_stacked(world: Any) -> Any:
    return [*world.stack.parameters(), parameter(2)]


def fixed_on_a_stack(world: Any) -> object:
    return hk.FusedSGD(world.stack.parameters(), gradients="fixed")


def stochastic_fp16(world: Any) -> object:
    return hk.FusedSGD([parameter(2, dtype=torch.float16)], stochastic_rounding=True)


def bad_norm(value: Any) -> Callable[[Any], object]:
    return lambda world: setattr(world.optimizer, "max_grad_norm", value)


PARAMETERS: list[Row] = [
    Row("None", over(lambda w: None), TypeError, "iterable|parameters must be tensors"),
    Row("none", over(lambda w: []), ValueError, "empty parameter list"),
    Row("a tensor", over(lambda w: torch.ones(3)), TypeError, "iterable of Tensors"),
    Row("numbers", over(lambda w: [1.0, 2.0]), TypeError, "can only optimize Tensors"),
    Row("text", over(lambda w: "ab"), TypeError, "can only optimize Tensors"),
    Row("groups without params", over(lambda w: [{"lr": 0.1}]), (KeyError, TypeError, ValueError), "param"),
    Row("a parameter in two groups", over(two_groups), ValueError, "more than one parameter group"),
    Row("no leaf", over(lambda w: [w.bare_model[0].weight * 2]), ValueError, "non-leaf"),
    Row("complex", over(lambda w: [parameter(2, dtype=torch.complex64)]), ValueError, "need real numbers"),
    Row("integers", over(lambda w: [parameter(2, dtype=torch.int32, grad=False)]), ValueError, "expected one of"),
    Row("meta", over(lambda w: [parameter(2, device="meta")]), ValueError, "meta device"),
    Row("expanded", over(lambda w: [nn.Parameter(torch.ones(1).expand(4))]), ValueError, "gaps or overlaps"),
    Row("half shared", over(half_shared), ValueError, "share part of their memory"),
    Row("plain and stacked", over(plain_and_stacked), ValueError, "those of one stack, or all plain", "stack"),
    Row("fixed on a stack", fixed_on_a_stack, ValueError, "is for plain parameters", "stack"),
    Row("stochastic fp16", stochastic_fp16, ValueError, "stochastic rounding is for bfloat16"),
]

GROUPS: list[Row] = [
    Row("lr", group(lr=-1.0), ValueError, "lr must be .* got -1.0"),
    Row("lr of text", group(lr="x"), BOTH, "lr must be .* got 'x'"),
    Row("betas", group(betas=(0.9, 2.0)), ValueError, "betas must "),
    Row("eps", group(eps=NAN), ValueError, "eps must be .* got nan"),
    Row("a flag", group(maximize="yes"), BOTH, "maximize must be True or False, got 'yes'"),
    Row("no dict", lambda w: w.optimizer.add_param_group([]), TypeError, "dict"),
    Row(
        "params twice",
        lambda w: w.optimizer.add_param_group({"params": [w.model[0].weight]}),
        ValueError,
        "more than one",
    ),
    Row("meta", lambda w: w.optimizer.add_param_group({"params": [parameter(2, device="meta")]}), ValueError, "meta"),
    Row(
        "complex",
        lambda w: w.optimizer.add_param_group({"params": [parameter(2, dtype=torch.complex64)]}),
        ValueError,
        "real",
    ),
    *(
        Row(f"max_grad_norm = {value!r}", bad_norm(value), BOTH, "max_grad_norm must be ")
        for value in (0, -1, NAN, "x", True, [])
    ),
]

AREAS = {"optimizer keywords": KEYWORDS, "optimizer parameters": PARAMETERS, "optimizer groups": GROUPS}
