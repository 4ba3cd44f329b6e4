"""Optimizer state in 8 bits as ``state[p]`` shows it: ``"exp_avg"`` are the codes, ``"exp_avg_scale"`` their scales.

The codes have the shape of the parameter, and the scales are [blocks], or [replicas, blocks] where each replica of a
stack has its own state. The blocks run over the elements in the order in which the codes lie in memory. Codes of a
distributed parameter are distributed like it, and their scales are those of this process's part; since blocks cannot be
divided in another way, a ``state_dict`` has the decoded numbers then. Codes in a ``state_dict`` have one dimension more
(:func:`saved_codes`). :mod:`hdet_kernels.ops.torch.companding` has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops.torch.companding import SIGNED_STATES, block_count, decode, encode, encode_again
from hdet_kernels.sharded import distributed_like, is_distributed, part_of
from hdet_kernels.tensors import Slot, flat_view, replicas_of


def scale_name(name: str) -> str:
    """Return the name in ``state[p]`` of the scales of state ``name``."""
    return f"{name}_scale"


def is_coded(value: object) -> bool:
    """Return whether a value of ``state[p]`` consists of codes."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def decoded(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of an entry of ``state[p]``, in its shape and layout."""
    if is_distributed(codes):
        return distributed_like(codes, decoded(name, part_of(codes), scales))
    if scales.dim() == 2:
        rows = [decoded(name, *row) for row in zip(codes, scales, strict=True)]
        return torch.stack(rows) if rows else codes.float()
    values = torch.empty_like(codes, dtype=torch.float32)
    flat_view(values).copy_(decode(flat_view(codes), scales, name in SIGNED_STATES))
    return values


@dataclass(frozen=True)
class CodedSlot:
    """The place of a parameter in flat buffers of codes: its codes of one state and their scales, views of these."""

    slot: Slot
    codes: Tensor
    scales: Tensor

    def write(self, name: str, value: Tensor | float, scales: Tensor | None, *, decoded_before: bool = True) -> None:
        """Write one number for all elements, numbers, or codes with their scales, with or without replicas.

        Codes in the same memory order are copied, and anything else is encoded. Numbers that may have been decoded from
        codes (``decoded_before``) decode to the same again.
        """
        if not isinstance(value, Tensor):  # without a float32 copy of the whole slot
            one, scale = encode_again(torch.full((1,), value, device=self.codes.device), name in SIGNED_STATES)
            self.codes.copy_(one.squeeze(0))
            self.scales.copy_(scale)
            return
        if scales is not None:
            row = value if scales.dim() == 1 else value[0] if len(value) else None
            if row is not None and self.slot.in_order(row.stride()):
                self.codes.copy_(value)
                self.scales.copy_(scales)
                return
            value = decoded(name, value, scales)
        encoder = encode_again if decoded_before else encode
        coded, block_scales = encoder(self._in_memory_order(value), name in SIGNED_STATES)
        self.codes.copy_(torch.as_strided(coded, self.codes.shape, self._strides))
        self.scales.copy_(block_scales)

    @property
    def _strides(self) -> tuple[int, ...]:
        return (*(self.slot.numel for _ in self.scales.shape[:-1]), *self.slot.stride)

    def _in_memory_order(self, value: Tensor) -> Tensor:
        """Return a float32 copy [n] or [replicas, n] on the device of the slot."""
        flat = torch.zeros((*self.scales.shape[:-1], self.slot.numel), device=self.codes.device)
        torch.as_strided(flat, self.codes.shape, self._strides).copy_(value)
        return flat


def saved_codes(codes: Tensor) -> Tensor:
    """Return codes as a ``state_dict`` has them: [1, *shape].

    ``torch.distributed.checkpoint`` and ``torch.optim`` look at the shapes of what they load and at no dtypes. Codes of
    the parameter's shape would become float32 moments between 0 and 255, and nobody would notice.
    """
    return codes.unsqueeze(0)


def with_own_shapes(entries: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
    """Return an entry of a ``state_dict`` with its codes in the shape that they have in ``state[p]``.

    One of ``optimizer.state`` stays as it is.
    """
    if not any(map(is_coded, entries.values())):
        return entries
    own = param.dim() - (replicas_of(param) is not None)

    def with_own_shape(name: str, value: Any) -> Any:
        # Where each replica has its own state, codes and scales have a dimension more.
        scales = entries.get(scale_name(name)) if is_coded(value) else None
        saved = isinstance(scales, Tensor) and value.dim() == own + scales.dim() and len(value) == 1
        return value[0] if saved else value

    return {name: with_own_shape(name, value) for name, value in entries.items()}


def decoded_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of ``optimizer.state`` with its codes decoded, and without scales."""
    scales = {scale_name(name) for name, value in entries.items() if is_coded(value)}
    return {
        name: decoded(name, value, entries[scale_name(name)]) if is_coded(value) else value
        for name, value in entries.items()
        if name not in scales
    }


def decoded_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict of a fused optimizer with 8-bit state as one with float32 state, which torch.optim loads.

    State that is not in 8 bits is that of ``state_dict``, not a copy. What is no state_dict of an optimizer, or was
    flattened, raises ValueError.
    """
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), Mapping):
        raise ValueError(
            "decoded_state_dict needs what optimizer.state_dict() or get_optimizer_state_dict() returned, a dict with "
            "an entry 'state'; leave flatten_optimizer_state_dict out"
        )
    state = {
        key: decoded_entries(_without_first_dimension(entries)) if isinstance(entries, Mapping) else entries
        for key, entries in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _without_first_dimension(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value[0] if is_coded(value) and value.dim() and len(value) == 1 else value
        for name, value in entries.items()
    }


def check_coded(where: str, name: str, entries: Mapping[str, Any]) -> None:
    """Raise ValueError unless loaded codes can be decoded: with scales that fit them, and not of amsgrad."""
    codes, scales = entries[name], entries.get(scale_name(name))
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32 or scales.layout is not torch.strided:
        given = f"of {scales.dtype}" if isinstance(scales, Tensor) else repr(scales)
        raise ValueError(
            f"{where} has {name} in 8 bits with {scale_name(name)} {given}, expected a float32 tensor; the file is "
            "damaged"
        )
    shape = (block_count(codes.numel()),)
    rows = (len(codes), block_count(codes[0].numel())) if codes.dim() and len(codes) else shape
    if scales.shape not in (shape, rows) or scales.is_meta:
        raise ValueError(
            f"{where} has {name} of shape {tuple(codes.shape)} in 8 bits with {scale_name(name)} of shape "
            f"{tuple(scales.shape)}, expected {shape}; the file is damaged"
        )
    if name == "max_exp_avg_sq" or bool((scales < 0).any()):
        raise ValueError(
            f"{where} has {name} in 8 bits as only a version before 0.2.0 wrote it, with amsgrad=True; decode it there "
            "by decoded_state_dict, or start without it"
        )
