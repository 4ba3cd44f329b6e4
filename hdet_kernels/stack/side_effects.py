"""Side effects of a forward pass on the template module.

While a loss is computed, the template has the tensors of one replica in the place of its own. Forward may assign new
tensors to buffers (kept, as state of the replica) or to plain attributes (dropped, with a warning). A loss that
reaches the template's own parameters instead of the replica's is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("hdet_kernels")


class BufferAssignments:
    """Finds buffers to which a forward pass has assigned new tensors.

    Args:
        module: the template.
        names: the names of the buffers to look at.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        split = [(name, *name.rpartition(".")[::2]) for name in names]
        self._buffers = [(name, module.get_submodule(owner), attribute) for name, owner, attribute in split]

    def find(self, before: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the new tensors by the index of their buffer.

        Args:
            before: the tensors that the buffers held before the forward pass.

        Raises:
            RuntimeError: a buffer was removed or has another shape now.
        """
        found = {}
        for index, ((name, owner, attribute), old) in enumerate(zip(self._buffers, before, strict=True)):
            new = getattr(owner, attribute, None)
            if new is old:
                continue
            if new is None or new.shape != old.shape:
                raise RuntimeError(
                    f"forward has set buffer {name} of shape {tuple(old.shape)} to "
                    f"{None if new is None else f'a tensor of shape {tuple(new.shape)}'}; buffers of a stack must keep "
                    "their shapes"
                )
            found[index] = new
        return found


class AttributeGuard:
    """Removes tensors that a forward pass assigns to attributes of modules; used in a ``with`` statement.

    Such a tensor belongs to one replica or, under vmap, to a transform that has ended, and cannot be used afterwards.
    Logs one warning with the names of the attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._warned = module, False
        self._before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Tensor]]] = []

    def __enter__(self) -> None:
        self._before = [
            (f"{name}." if name else "", part, dict(vars(part)), dict(part.named_buffers(recurse=False)))
            for name, part in self._module.named_modules()
        ]

    def __exit__(self, *_: object) -> None:
        dropped = []
        for prefix, part, attributes, buffers in self._before:
            for name in _new_tensors(vars(part), attributes):
                if name in attributes:
                    vars(part)[name] = attributes[name]
                else:
                    del vars(part)[name]
                dropped.append(prefix + name)
            for name in _new_tensors(dict(part.named_buffers(recurse=False)), buffers):
                setattr(part, name, buffers.get(name))
                dropped.append(prefix + name)
        self._before = []
        named = [
            name for name in dropped if not name.rpartition(".")[2].startswith("_")
        ]  # caches, as torch's RNNs have
        if named and not self._warned:
            self._warned = True
            log.warning(
                "forward sets %s to a tensor, which is dropped when the losses are computed; if it is state of a "
                "replica, make it a buffer (register_buffer)",
                ", ".join(named),
            )


def _new_tensors(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that have become tensors, or lists, tuples or dicts of tensors."""
    missing = object()
    changed = {name: value for name, value in now.items() if value is not before.get(name, missing)}
    return [name for name, value in changed.items() if any(isinstance(item, Tensor) for item in _items(value))]


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a list, tuple or dict; for anything else the value itself."""
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


@contextlib.contextmanager
def refuse_template_gradients(module: nn.Module) -> Iterator[None]:
    """Raise RuntimeError if a loss inside the block gives gradients to the template's own parameters.

    No replica trains these. The gradients are removed.
    """
    before = [(name, param, param.grad) for name, param in module.named_parameters()]
    for _, param, _ in before:
        param.grad = None
    reached = []
    try:
        yield
    finally:
        for name, param, gradient in before:
            if param.grad is not None:
                reached.append(name)
            param.grad = gradient
    if reached:
        raise RuntimeError(
            f"the loss depends on the module's own {', '.join(reached)}, not on the replicas': loss_fn must use the "
            "model that it is given; the module must read its parameters where they are registered, not from a list or "
            "another attribute; parameters that were frozen when the stack was built must stay frozen"
        )
