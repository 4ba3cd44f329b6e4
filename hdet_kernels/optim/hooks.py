"""Run the step hooks of an optimizer, the profiler's mark of a step and the guard against torch.compile only where they
are in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def hooks_if_registered(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` as ``Optimizer`` would by itself, hide it from torch.compile, and do only what is in use.

    torch's wrapper runs the registered hooks and marks the step for the profiler. The mark alone costs a fifth of the
    host time of a fused step, so it is left out while nothing is profiled. So is the guard that keeps
    torch.compile from tracing the step, while nothing is traced.
    """
    traceable, untraced = step, torch._disable_dynamo(step)  # type: ignore[attr-defined]
    marked_for_profiler = Optimizer.profile_hook_step(untraced)

    @wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        own = type(self).step
        step = untraced if is_dynamo_compiling() or _traced_when_called() else traceable
        if own is not wrapper and _has_hooks(own):  # called by a subclass's step, which runs the hooks
            return step(self, *args, **kwargs)
        if profiler._is_profiler_enabled:
            return marked_for_profiler(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            return _with_hooks(step, (self, *args), kwargs)
        return step(self, *args, **kwargs)

    return _marked(wrapper)


def _no_callback() -> object:
    """Return something else than ``None``: of a torch without the question, the guard is always used."""
    return ...


# The callback that torch.compile has set for the frames that run now; ``None`` outside of compiled functions.
_callback: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", _no_callback)


def _traced_when_called() -> bool:
    """Return whether torch.compile would trace a function that is called now."""
    return _callback() is not None


def _with_hooks(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a step between its hooks, global ones outermost. A hook before it may return other arguments for it."""
    optimizer: Optimizer = args[0]
    before = (torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
    after = (optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks)
    for hook in (hook for hooks in before for hook in hooks.values()):
        changed = hook(optimizer, args, kwargs)
        if changed is None:
            continue
        if not (isinstance(changed, tuple) and len(changed) == 2):
            raise RuntimeError(f"a step_pre_hook must return None or a tuple of (new_args, new_kwargs), got {changed}")
        args, kwargs = changed
    result = step(*args, **kwargs)
    optimizer._optimizer_step_code()
    for hook in (hook for hooks in after for hook in hooks.values()):
        hook(optimizer, args, kwargs)
    return result


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
