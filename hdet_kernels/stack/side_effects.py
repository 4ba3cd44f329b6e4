"""Side effects of a forward pass on the template module.

While a loss is computed, the template has the tensors of one replica in the place of its own. Forward may assign new
tensors to buffers (kept, as state of the replica) or to plain attributes (dropped, with a warning). A loss that
reaches the template's own parameters instead of the replica's is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
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
            new = owner._buffers.get(attribute)
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
    """Removes tensors that a forward pass assigns to plain attributes of modules.

    Such a tensor belongs to one replica or, under vmap, to a transform that has ended, and cannot be used afterwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._warned = module, False

    @contextlib.contextmanager
    def __call__(self, is_unusable: Callable[[Tensor], bool]) -> Iterator[None]:
        """Restore, at the end of the block, the attributes that were set to tensors for which ``is_unusable`` holds.

        Logs one warning with their names.
        """
        before = [(name, m, dict(m.__dict__), dict(m._buffers)) for name, m in self._module.named_modules()]
        try:
            yield
        finally:
            dropped = [
                f"{name}.{attribute}" if name else attribute
                for name, module, attributes, buffers in before
                for now, was in ((module.__dict__, attributes), (module._buffers, buffers))
                for attribute in _restore(now, was, is_unusable)
                if not attribute.startswith("_")  # a cache, like the _flat_weights of torch's RNNs
            ]
            if dropped and not self._warned:
                self._warned = True
                log.warning(
                    "forward sets %s to a tensor, which is dropped when the losses are computed; if it is state of a "
                    "replica, make it a buffer (register_buffer)",
                    ", ".join(dropped),
                )


def _restore(now: dict[str, Any], was: dict[str, Any], is_unusable: Callable[[Tensor], bool]) -> list[str]:
    """Undo assignments of unusable tensors in ``now``, and return the names of those attributes."""
    missing = object()
    changed = [
        name
        for name, value in now.items()
        if value is not was.get(name, missing)
        and any(isinstance(item, Tensor) and is_unusable(item) for item in _items(value))
    ]
    for name in changed:
        if name in was:
            now[name] = was[name]
        else:
            del now[name]
    return changed


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

    def mark(param: Tensor) -> tuple[int, int] | None:
        return None if param.grad is None else (id(param.grad), param.grad._version)

    named = [(name, param, mark(param)) for name, param in module.named_parameters()]
    reached: list[str] = []
    try:
        yield
    finally:
        for name, param, before in named:
            if mark(param) != before:
                param.grad = None
                reached.append(name)
    if reached:
        raise RuntimeError(
            f"the loss depends on the module's own {', '.join(reached)}, not on the replicas': loss_fn must use the "
            "model that it is given; the module must read its parameters where they are registered, not from a list or "
            "another attribute; parameters that were frozen when the stack was built must stay frozen"
        )
