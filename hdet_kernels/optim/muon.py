"""Muon for matrices, with AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.checks import check_at_least_zero, check_below_one, check_flags, check_params
from hdet_kernels.optim.flat_group import FlatGroup
from hdet_kernels.optim.group_entries import PER_REPLICA, Group
from hdet_kernels.optim.muon_group import ROW_SQUARES, MuonGroup, Orthogonal
from hdet_kernels.optim.options import GradientStorage, MasterWeights, Options
from hdet_kernels.tensors import replicas_of

log = logging.getLogger("hdet_kernels")

#: Entries of a group of matrices that cannot differ between replicas: they act on the update that all of them share.
_COMMON = ("eps", "ns_coefficients", "ns_steps", "normuon_beta2")

#: The most Newton–Schulz steps, exclusive, as in torch.optim.Muon.
_MOST_STEPS = 100


class FusedMuon(FusedOptimizer):
    """Muon as in torch.optim for matrices, and AdamW for the rest.

    With B the momentum, ``B ← μ·B + (1 − μ)·g``, a matrix moves by an orthogonalised update::

        O = NewtonSchulz(μ·B + (1 − μ)·g)        with nesterov, else of B
        θ ← θ·(1 − lr·weight_decay) − lr·s·O

    ``s`` is √max(1, rows/columns) (``adjust_lr_fn`` None or ``"original"``), or 0.2·√max(rows, columns)
    (``"match_rms_adamw"``: updates as large as AdamW's).

    A group with ``use_muon=True`` holds matrices alone, one with ``use_muon=False`` is trained by AdamW, and its
    ``lr``, ``weight_decay``, ``eps`` and ``betas`` (or ``adamw_lr``, …) are AdamW's. A group without ``use_muon`` is
    divided into these two, matrices first; its own ``lr``, ``weight_decay`` and ``eps`` are then those of the matrices.
    Embeddings and output heads are matrices as well: give them a group with ``use_muon=False``, as is usual. Learning
    rate schedulers and ``Explore`` see two groups with a learning rate each.

    Args:
        params: parameters or groups.
        lr: learning rate of the matrices.
        weight_decay: decoupled weight decay of the matrices.
        momentum: μ.
        nesterov: whether the update has Nesterov's correction.
        ns_coefficients: a, b and c of the iteration ``X ← a·X + (b·A + c·A²)·X`` with ``A = X·Xᵀ``.
        eps: the least norm by which an update is divided before the iteration.
        ns_steps: the number of iterations.
        adjust_lr_fn: ``"original"`` (None) or ``"match_rms_adamw"``.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: AdamW's, for groups that do not have their own.
        normuon: divide each row of O by the root of the mean of its squares over the steps, and scale the result to
            the norm of O (NorMuon, arXiv 2510.05491).
        normuon_beta2: the decay rate of that mean.
        max_grad_norm, gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions: as for
            the other optimizers; gradients are clipped by their norm over all parameters.
    """

    rule = "muon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        max_grad_norm: float | None = None,
        gradients: GradientStorage = "autograd",
        master_weights: MasterWeights = None,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        backend: str | None = None,
        advance_versions: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
            # Not "betas": OneCycleLR would cycle them, and leave the momentum of the matrices alone.
            "adamw_betas": adamw_betas,
            "normuon": normuon,
            "normuon_beta2": normuon_beta2,
        }
        self._adamw: dict[str, Any] = {
            "lr": adamw_lr,
            "weight_decay": adamw_weight_decay,
            "eps": adamw_eps,
            "adamw_betas": adamw_betas,
        }
        self.check_group(defaults | self._adamw | {"use_muon": False})
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)
        if not any(group["use_muon"] for group in self.param_groups):
            log.warning(
                "FusedMuon was given no matrix: AdamW trains all %d parameters. Some wrappers make vectors of them "
                "(FullyShardedDataParallel); train them unsharded, or use FusedAdamW",
                len(self.buckets.params),
            )

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "use_muon", "nesterov", "normuon")
        check_at_least_zero(group, "lr", "weight_decay", "momentum", "eps")
        if not group["use_muon"]:
            check_below_one({"betas": group["adamw_betas"]}, "betas")
            return
        check_below_one(group, "normuon_beta2")
        steps, coefficients = group["ns_steps"], group["ns_coefficients"]
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < _MOST_STEPS:
            raise ValueError(
                f"ns_steps must be a whole number from 0 to {_MOST_STEPS - 1}, got {steps!r}; the default is 5"
            )
        if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
            raise ValueError(f"ns_coefficients must be exactly 3 numbers, got {coefficients!r}; leave them out")
        for value in coefficients:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"ns_coefficients must be 3 numbers, got {coefficients!r}; leave them out")
        for name in ("eps", "normuon_beta2"):
            if isinstance(group[name], Tensor):
                raise ValueError(f"{name} of matrices must be a number, got a tensor; pass float({name})")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be 'original', 'match_rms_adamw' or None, got {group['adjust_lr_fn']!r}"
            )
        if apart := sorted(set(_COMMON).intersection(key.split("[")[0] for key in group.get(PER_REPLICA, {}))):
            raise ValueError(
                f"{apart[0]} of matrices cannot differ between replicas; explore lr, weight_decay or momentum, or give "
                "Explore the groups=[…] that AdamW trains"
            )

    def row(self, group: Group) -> dict[str, float | Tensor]:
        row = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if group["use_muon"]:
            return row | {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        beta1, beta2 = group["adamw_betas"]
        return row | {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}

    def state_names(self, group: Group) -> tuple[str, ...]:
        if not group["use_muon"]:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer", ROW_SQUARES) if group["normuon"] else ("momentum_buffer",)

    def known_states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer", ROW_SQUARES) if group["use_muon"] else ops.STATES["adamw"]

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1) if name == ROW_SQUARES else shape

    def shows_step_of(self, group: Group) -> bool:
        return not group["use_muon"]

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, or the two groups into which one without ``use_muon`` is divided."""
        if not isinstance(param_group, dict):
            return super().add_param_group(param_group)  # torch refuses it
        check_params(param_group.get("params"))
        before = len(self.param_groups)
        try:
            for part in self._divided(param_group):
                super().add_param_group(part)
        except Exception:
            added = len(self.param_groups) > before
            del self.param_groups[before:]
            if added and hasattr(self, "_flat_groups"):
                self._build()
            raise

    def _divided(self, param_group: Group) -> list[Group]:
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        own = {key: value for key, value in param_group.items() if key not in _ADAMW_NAMES}
        named = {name: param_group[key] for key, name in _ADAMW_NAMES.items() if key in param_group}
        if "use_muon" in param_group:
            check_flags(param_group, "use_muon")
            if param_group["use_muon"]:
                return [{**param_group, "params": params}]
            return [self._adamw | named | own | {"params": params}]
        matrices = [each for each in params if _is_matrix(each)]
        others = [each for each in params if not _is_matrix(each)]
        parts: list[Group] = []
        if matrices or not others:
            parts.append(own | {"params": matrices, "use_muon": True})
        if others:
            # The numbers of a mixed group are those of its matrices.
            kept = {key: value for key, value in own.items() if not matrices or key not in self._adamw}
            parts.append(self._adamw | kept | named | {"params": others, "use_muon": False})
        return parts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, or of torch.optim.Muon if all parameters are matrices.

        Raises:
            ValueError: with nothing changed, if an entry is missing, unknown, or has another shape or kind of value,
                or if a group was trained by the other of Muon and AdamW.
        """
        saved = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if isinstance(saved, list):
            if len(saved) != len(self.param_groups):
                here = ", ".join("Muon" if group["use_muon"] else "AdamW" for group in self.param_groups)
                raise ValueError(
                    f"the loaded state_dict has {len(saved)} parameter groups, this optimizer has "
                    f"{len(self.param_groups)} ({here}; a group without use_muon is divided): build it with the groups "
                    "that it was saved with. State of torch.optim.Muon loads where all parameters are matrices"
                )
            for number, (group, own) in enumerate(zip(saved, self.param_groups, strict=False)):
                if isinstance(group, Mapping) and bool(group.get("use_muon", True)) != bool(own["use_muon"]):
                    raise ValueError(
                        f"group {number} has use_muon={own['use_muon']} here and {group.get('use_muon', True)} in the "
                        "loaded state_dict: build the optimizer with the groups that it was saved with"
                    )
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_adamw": self._adamw}

    def _check_params(self, group: Group) -> None:
        for index, param in enumerate(group["params"] if group["use_muon"] else ()):
            if not _is_matrix(param):
                raise ValueError(
                    f"Muon only supports 2D parameters, parameter {index} has size {tuple(param.shape)}: give it a "
                    "group with use_muon=False, or leave use_muon out"
                )
            if hasattr(param, "to_local"):
                raise ValueError(
                    f"parameter {index} of size {tuple(param.shape)} is a shard, and Muon orthogonalises whole "
                    "matrices: give it a group with use_muon=False, or train it unsharded"
                )
        super()._check_params(group)

    def _make_buckets(self) -> Buckets:
        matrices = [param for group in self.param_groups if group["use_muon"] for param in group["params"]]
        by_muon = {id(param) for param in matrices}
        # Matrices of one shape lie side by side, so that they are orthogonalised at once where they are.
        ordered = [
            param
            for group in self.param_groups
            for param in (sorted(group["params"], key=_layout) if group["use_muon"] else group["params"])
        ]
        return Buckets(ordered, kind_of=lambda param: id(param) in by_muon)

    def _make_flat_group(self, *arguments: Any, shares_state: bool) -> FlatGroup:
        groups = arguments[_GROUPS]
        if self.param_groups[groups[0]]["use_muon"]:
            return MuonGroup(self._settings, *arguments, shares_state=shares_state)
        return FlatGroup("adamw", *arguments, shares_state=shares_state)

    def _settings(self, number: int) -> Orthogonal:
        return Orthogonal.of(self.param_groups[number])


#: The keys of a group that are for AdamW, with their names in AdamW's group. Of two with one name the later one counts.
_ADAMW_NAMES = {
    "adamw_lr": "lr",
    "adamw_weight_decay": "weight_decay",
    "adamw_eps": "eps",
    "adamw_betas": "adamw_betas",
    "betas": "adamw_betas",
}

# The place of the groups of all slots among the arguments of FlatGroup after the rule.
_GROUPS = 4


def _is_matrix(given: Any) -> bool:
    """Return whether a parameter, or a pair of its name and itself, is a matrix (in each replica of a stack)."""
    param = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    return isinstance(param, Tensor) and param.dim() - (replicas_of(param) is not None) == 2


def _layout(param: Tensor) -> tuple[Iterable[int], Iterable[int]]:
    return tuple(param.shape), tuple(param.stride())
