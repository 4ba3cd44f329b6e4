"""The base class of the fused optimizers: torch.optim's semantics over flat parameters and flat state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import Gradients
from hdet_kernels.optim.checks import check_max_grad_norm, check_param
from hdet_kernels.optim.home import Home, homes_of

Closure = Callable[[], float]
Group = dict[str, Any]

#: Options of torch.optim that say how a step is computed, not what: dropped from the groups of a loaded state_dict.
_HOW = ("foreach", "fused", "capturable", "differentiable")


class FusedOptimizer(Optimizer):
    """A subclass names its rule and says how a parameter group becomes a row of the hyperparameter table.

    Parameters move into :attr:`buckets` when the optimizer is built, and ``state[p]`` holds views of flat buffers.
    Hyperparameters are read from ``param_groups`` at every step, so anything that writes there (schedulers) works.
    """

    rule: ClassVar[str]
    #: Whether ``state[p]`` has torch.optim's ``step``. Step counts exist for every rule; here it is who sees them.
    shows_step: ClassVar[bool] = True
    #: Whether ``state[p]`` exists before the first step.
    eager_state: ClassVar[bool] = False

    #: torch's GradScaler then sets ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, max_grad_norm: float | None, backend: str | None
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.backend = backend
        self.check_group(defaults)
        super().__init__(params, defaults)
        self._build()

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if an option of ``group`` is out of range."""
        raise NotImplementedError

    def row(self, group: Group) -> dict[str, float | Tensor]:
        """The hyperparameters of ``group`` by the columns of the table."""
        raise NotImplementedError

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The state buffers that parameters of ``group`` have."""
        return ops.STATES[self.rule]

    def initial_state(self, name: str, group: Group) -> float:
        """What the state ``name`` is filled with before the first step."""
        return 0.0

    def state_flats(self) -> dict[str, Tensor]:
        """The flat buffers of all floating state (moments; no step counts), laid out like ``buckets.flats`` and named
        by the number of the flat buffer and the state."""
        return {
            f"{number}/{name}": flat
            for number, home in enumerate(self._homes)
            for name, flat in home.states.items()
            if flat is not None
        }

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """One step for every parameter that has a gradient. ``closure`` re-evaluates the loss and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Whatever can fail comes first: a step happens for all parameters or for none.
        self._return_home()
        grads = self._gradients()
        for home, present in zip(self._homes, grads, strict=True):
            self._publish(home, present)
        rows = [self.row(group) for group in self.param_groups]
        for table in {id(home.table): home.table for home in self._homes}.values():
            table.write(rows)
        multiplier, found_inf = self._scaling(grads)
        for home, present in zip(self._homes, grads, strict=True):
            if not any(present.addresses):
                continue
            device = home.flat.device
            ops.step(
                self.rule,
                home.flat,
                list(home.states.values()),
                home.steps,
                home.table.tensor,
                home.chunks,
                present,
                multiplier=_scalar(multiplier, device, home.table.tensor.dtype),
                found_inf=_scalar(found_inf, device, torch.float32),
                backend=self.backend,
            )
        return loss

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
            self._check_params()
            if hasattr(self, "_homes"):
                self._build()
        except Exception:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"max_grad_norm": self.max_grad_norm, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by ``load_state_dict``, ``pickle`` and ``deepcopy``."""
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            for name in _HOW:
                group.pop(name, None)
            for name, value in defaults.items():
                if name not in _HOW:
                    group.setdefault(name, value)
            self.check_group(group)
        _check_shapes(state["state"])
        super().__setstate__(state)
        if hasattr(self, "_homes"):
            self._return_home()
            self._adopt_state()
        else:
            self._build()

    def _check_params(self) -> None:
        owner: dict[tuple[torch.device, int], int] = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                check_param(index, param)
                resolve(param.device, self.backend)
                if param.numel() and owner.setdefault((param.device, param.data_ptr()), number) != number:
                    raise ValueError(
                        f"parameter {index} of group {number} shares its memory with one of group "
                        f"{owner[param.device, param.data_ptr()]}; tied parameters must be in one group"
                    )

    def _build(self) -> None:
        """Move all parameters into buckets, and the state that they have along with them."""
        row_of = {id(param): row for row, group in enumerate(self.param_groups) for param in group["params"]}
        self.buckets = Buckets(param for group in self.param_groups for param in group["params"])
        rows = [row_of[id(param)] for param in self.buckets.params]
        self._homes = homes_of(self.rule, self.buckets, rows, len(self.param_groups))
        self._addresses = [param.data_ptr() for param in self.buckets.params]
        self._adopt_state()

    def _return_home(self) -> None:
        """Notice parameters that were moved (at the price of a pointer each) and state that was cleared or replaced
        since the last step. A single entry of ``state[p]`` is to be changed in place; it is a view."""
        if [param.data_ptr() for param in self.buckets.params] != self._addresses:
            self.buckets.rehome()
        if self.state is not self._seen_state or len(self.state) != self._seen_count:
            self._adopt_state()

    def _gradients(self) -> list[Gradients]:
        grads = [home.gradients() for home in self._homes]
        # A parameter that was transposed in its place keeps its address; the layout of its gradient tells.
        if any(present.copied for present in grads) and self.buckets.rehome():
            grads = [home.gradients() for home in self._homes]
        return grads

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Copy what is in ``self.state`` into the flat state, and make ``self.state`` views of that."""
        for home in self._homes:
            home.unpublished = set(range(len(home.residents)))
            for index, tied in enumerate(home.residents):
                group = self.param_groups[home.chunks.rows[index]]
                found: dict[str, Any] = next((self.state[param] for param in tied if self.state.get(param)), {})
                names = self.state_names(group)
                kept = [name for name in home.states if found.get(name) is not None]
                for name in dict.fromkeys([*names, *kept]):
                    view = home.view(name, index)
                    if name in kept:
                        view.copy_(found[name])
                    else:
                        view.fill_(self.initial_state(name, group))
                # A rule without a public step count needs to know only whether it has stepped before.
                home.steps[index].copy_(torch.as_tensor(found.get("step", 1.0 if kept else 0.0)))
                if found or self.eager_state:
                    self._publish_slot(home, index, (*names, *kept))
        self._seen_state, self._seen_count = self.state, len(self.state)
        self._published_names = [self.state_names(group) for group in self.param_groups]

    def _publish(self, home: Home, grads: Gradients) -> None:
        """Let ``self.state`` show the state of parameters that step for the first time, as torch.optim does."""
        names = [self.state_names(group) for group in self.param_groups]
        if names != self._published_names:
            for each in self._homes:
                each.unpublished = set(range(len(each.residents)))
            self._published_names = names
        for index in [index for index in home.unpublished if grads.tensors[index] is not None]:
            self._publish_slot(home, index, names[home.chunks.rows[index]])
        self._seen_count = len(self.state)

    def _publish_slot(self, home: Home, index: int, names: Iterable[str]) -> None:
        home.unpublished.discard(index)
        shown: dict[str, Tensor] = {"step": home.steps[index]} if self.shows_step else {}
        shown |= {name: home.view(name, index) for name in names}
        for param in home.residents[index] if shown else ():
            self.state[param].update(shown)

    def _scaling(self, grads: list[Gradients]) -> tuple[Tensor | None, Tensor | None]:
        """What gradients are multiplied by (AMP and clipping in one factor), and whether to skip; on the device."""
        multiplier: Tensor | None = None
        scale = getattr(self, "grad_scale", None)
        if isinstance(scale, Tensor):
            multiplier = scale.double().squeeze().reciprocal()
        if self.max_grad_norm is not None:
            norm = ops.grad_norm(grad for home in grads for grad in home.present).double()
            if multiplier is not None:
                multiplier = multiplier.to(norm.device, non_blocking=True)
                norm = norm * multiplier
            # As in clip_grad_norm_: 1e-6 keeps a zero norm from dividing by zero.
            clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            multiplier = clip if multiplier is None else multiplier * clip
        found_inf = getattr(self, "found_inf", None)
        return multiplier, found_inf if isinstance(found_inf, Tensor) else None


def _scalar(value: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(device, dtype, non_blocking=True)


def _check_shapes(state: Mapping[Any, Any]) -> None:
    for param, entries in state.items():
        if not isinstance(param, Tensor):
            continue
        for name, value in entries.items():
            if name != "step" and isinstance(value, Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"the loaded state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}; "
                    "the state_dict is of another model, or its parameters are in another order"
                )
