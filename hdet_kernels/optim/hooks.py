"""Step hooks at the cost of checking whether there are any."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def hooks_if_registered(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` as ``Optimizer`` would by itself, and skip the wrapper while it has nothing to do.

    torch's wrapper runs the registered hooks and marks the step for the profiler. With neither in use it costs a fifth
    of the host time of a fused step.
    """
    with_hooks = Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        own = type(self).step
        if own is not wrapper and _has_hooks(own):  # called by a subclass's step, which runs the hooks
            return step(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        ):
            return with_hooks(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    return _marked(wrapper)


def hook_step(kind: type[Optimizer]) -> None:
    """Wrap the step of a class with hooks, if it is not wrapped yet.

    ``Optimizer`` does the same, but is misled by a step that only copied the mark of another (``functools.wraps``).
    """
    if not _has_hooks(kind.step):
        kind.step = _marked(Optimizer.profile_hook_step(kind.step))  # type: ignore[method-assign]


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    step.hooked = True  # type: ignore[attr-defined]  # keeps torch from wrapping it again
    step.hooked_as = step  # type: ignore[attr-defined]
    return step


def _has_hooks(step: Callable[..., Any]) -> bool:
    return getattr(step, "hooked_as", None) is step
