"""Label tensors for comparison and messages: their names where they have any, and which of them share memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

#: Returns names of parameters and buffers, as ``module.named_parameters()`` does. A tied tensor may have several.
Names = Callable[[], Iterable[tuple[str, Tensor]]]

# Parts of a name that a wrapper adds. A replica may be wrapped on one rank and not on another.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def labels_of(kinds: Mapping[str, Sequence[Tensor]], names: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a label for every tensor: its kind and all of its names, or else its number, such as ``"buffer 2"``.

    Args:
        kinds: the tensors by kind.
        names: the names that are known.
    """
    known: dict[int, list[str]] = {}
    for name, tensor in names:
        own = known.setdefault(id(tensor), [])
        if (plain := plain_name(name)) not in own:
            own.append(plain)
    return [
        f"{kind} {' = '.join(known.get(id(tensor), ())) or number}"
        for kind, tensors in kinds.items()
        for number, tensor in enumerate(tensors)
    ]


def plain_name(name: str) -> str:
    """Return the name without what DDP, FSDP, ``torch.compile`` and activation checkpointing add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def with_ties(labels: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """Return the labels, with a note at every tensor that starts at the memory of an earlier one."""
    first: dict[object, str] = {}
    noted = []
    for label, tensor in zip(labels, tensors, strict=True):
        owner = first.setdefault((tensor.device, tensor.data_ptr()), label) if tensor.numel() else label
        noted.append(label if owner == label else f"{label} tied to {owner}")
    return noted


def all_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of every parameter and buffer of a module, or of another model with the same two methods."""
    every = {"remove_duplicate": False} if isinstance(model, nn.Module) else {}
    yield from model.named_parameters(**every)
    yield from model.named_buffers(**every)
