"""Build the converger of any optimizer: find its parameters, the state that is averaged, and its step counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.converger import Converger
from hdet_kernels.converge.payload import AVERAGED, NoMean, all_names
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.optim.foreign import with_inner
from hdet_kernels.sharded import part_of
from hdet_kernels.tensors import unique
from hdet_kernels.torch_internals import tree_flatten


def converger_of(
    optimizer: Optimizer,
    ensemble: Ensemble,
    *,
    needs_state: bool | None = None,
    model: Any = None,
    wrappers: Sequence[Optimizer] = (),
    buffers: Callable[[], Sequence[Tensor]] = tuple,
    **options: Any,
) -> Converger:
    """Return the converger of all parameters, state and step counts of an optimizer.

    Args:
        optimizer: any torch optimizer. Those of this package are averaged in place, in their flat buffers.
        ensemble: the replicas.
        needs_state: has no effect any more: state that has no mean is compared at every average.
        model: a module whose names of parameters and buffers messages use.
        wrappers: optimizers around this one that keep state of their own, which is not averaged.
        buffers: returns the buffers that are averaged.
        options: the other keywords of :class:`Converger`, such as ``compress`` and ``outer``.
    """

    if needs_state is not None:
        warnings.warn(
            "converger_of(needs_state=…) has no effect: whether state differs between the replicas is found out at "
            "every average, and AverageRequest(average_state=…) decides",
            DeprecationWarning,
            stacklevel=2,
        )

    def names() -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            yield from zip(group.get("param_names", ()), group["params"], strict=False)
        if model is not None:
            yield from all_names(model)

    buckets = getattr(optimizer, "buckets", None)
    return Converger(
        buckets if isinstance(buckets, Buckets) else [p for group in optimizer.param_groups for p in group["params"]],
        ensemble,
        state=lambda: averaged_state(optimizer),
        no_mean=lambda: of_wrappers(wrappers) or without_mean(optimizer),
        write_state=getattr(optimizer, "write_state_flats", None),
        counts=StepCounts(optimizer),
        buffers=buffers,
        names=names,
        **options,
    )


def averaged_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the floating-point state of all parameters (moments, not step counts), by parameter and name."""
    flats = getattr(optimizer, "state_flats", None)
    if callable(flats):
        return dict(flats())
    return {
        f"{index}/{key}": value
        for index, state in enumerate(_states(optimizer))
        for key, value in sorted(state.items())
        if key != "step" and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }


def without_mean(optimizer: Optimizer) -> NoMean | None:
    """Return the state if a part of it has no mean: integer codes, tensor subclasses, containers of tensors."""
    if callable(getattr(optimizer, "state_flats", None)):
        return None
    tensors: list[Tensor] = []
    why = ""
    for index, state in enumerate(_states(optimizer)):
        for key, value in sorted(state.items()):
            parts = [] if key == "step" else [part for leaf in tree_flatten(value)[0] for part in _plain(leaf)]
            tensors += parts
            if parts and not why and not _has_mean(value):
                kind = f"{type(value).__name__} of {getattr(value, 'dtype', 'tensors')}"
                why = (
                    f"the state {key!r} of parameter {index} ({type(optimizer).__name__}) is {kind}, "
                    "which has no mean, and the replicas differ in it: average the gradients at every step (DDP) if it "
                    "depends on them alone, use an optimizer whose state has a mean, such as hk.FusedAdamW (in 8 bits "
                    "with state_dtype='int8'), or pass averaging=hk.Averaging(state=False)"
                )
    return NoMean(unique(tensors), why) if why else None


def of_wrappers(wrappers: Sequence[Optimizer]) -> NoMean | None:
    """Return the state that wrappers around an optimizer keep beside its state, such as Lookahead's slow weights."""
    for wrapper in wrappers:
        entries = [(key, value) for state in wrapper.state.values() for key, value in state.items()]
        if found := [(key, part) for key, value in entries for part in _plain(value)]:
            inner = type(getattr(wrapper, "optimizer", None)).__name__
            why = (
                f"{type(wrapper).__name__} keeps state {found[0][0]!r} of its own around {inner}, which is neither "
                "averaged nor brought back when the replicas return to the start: pass the inner optimizer alone, or "
                "averaging=hk.Averaging(state=False) to leave every replica its own"
            )
            return NoMean(unique(part for _, part in found), why)
    return None


def _has_mean(value: object) -> bool:
    if not isinstance(value, Tensor) or hasattr(type(part_of(value)), "__tensor_flatten__"):
        return False
    return value.dtype in AVERAGED or value.is_complex()


def _plain(value: object) -> Iterator[Tensor]:
    """Yield the tensors that have the memory of a tensor: itself, or those inside of a subclass."""
    if not isinstance(value, Tensor):
        return
    part: Any = part_of(value)
    if hasattr(type(part), "__tensor_flatten__"):
        for name in part.__tensor_flatten__()[0]:
            yield from _plain(getattr(part, name))
    else:
        yield part


class StepCounts:
    """Access to the step counts of all parameters that have one, as one tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def read(self) -> Tensor:
        """Return a copy, float32 on the CPU."""
        flats = getattr(self.optimizer, "step_flats", None)
        if callable(flats):
            found: list[Any] = flats()
        else:
            found = [state["step"] for state in _states(self.optimizer) if "step" in state]
        tensors = [
            (count if isinstance(count, Tensor) else torch.tensor(count, device="cpu")).detach().reshape(-1).float()
            for count in found
        ]
        # One transfer per device, not one per parameter.
        there = {device: [t for t in tensors if t.device == device] for device in {t.device for t in tensors}}
        here = {device: iter(torch.cat(group).cpu().split([len(t) for t in group])) for device, group in there.items()}
        return torch.cat([next(here[t.device]) for t in tensors]) if tensors else torch.zeros(0, device="cpu")

    def write(self, counts: Tensor) -> None:
        flats = getattr(self.optimizer, "step_flats", None)
        if callable(flats):
            targets = flats()
            for target, part in zip(targets, counts.split([len(target) for target in targets]), strict=True):
                target.copy_(part)
            return
        states = [state for state in _states(self.optimizer) if "step" in state]
        for state, count in zip(states, counts.tolist(), strict=True):
            if isinstance(state["step"], Tensor):
                state["step"].fill_(count)
            else:
                state["step"] = type(state["step"])(count)


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    params = unique(param for group in optimizer.param_groups for param in group["params"])
    return [each.state.get(param, {}) for each in with_inner(optimizer) for param in params]
