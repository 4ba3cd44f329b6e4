"""Muon for matrices, with AdamW for all other parameters, in one optimizer.

:class:`FusedMuon` divides the parameters into groups. :class:`MuonGroup` holds a flat buffer of matrices, and steps it:
momentum, orthogonalisation and move, shape by shape.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels import ops
from hdet_kernels.buckets import Buckets
from hdet_kernels.checks import check_choice, spell
from hdet_kernels.ops.backends import chosen, resolve
from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, MatchedGradients
from hdet_kernels.ops.newton_schulz import orthogonalise_
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch.companding import BLOCKS_PER_CHUNK, block_count
from hdet_kernels.ops.torch.newton_schulz import normalise_rows_
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.flat_group import FlatGroup, Part
from hdet_kernels.optim.group_entries import PER_REPLICA, Group, make_plain
from hdet_kernels.optim.options import (
    SharedOptions,
    check_at_least_zero,
    check_below_one,
    check_flags,
    check_params,
)
from hdet_kernels.tensors import Slot, replicas_of

log = logging.getLogger("hdet_kernels")

#: The most elements that are orthogonalised at once, unless one matrix has more. They take 2 bytes each for the update,
#: and 4 to 9 more while Newton–Schulz runs (6 for square matrices): about half a gibibyte of scratch memory.
PIECE_ELEMENTS = 2**26

#: The name of NorMuon's state: for each row of a matrix the mean of the squares of its updates.
ROW_SQUARES = "second_momentum_buffer"

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
        shared: as for the other optimizers; gradients are clipped by their norm over all parameters.
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
        **shared: Unpack[SharedOptions],
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
        make_plain(self._adamw)
        named = {f"adamw_{name.removeprefix('adamw_')}": value for name, value in self._adamw.items()}
        check_at_least_zero(named, "adamw_lr", "adamw_weight_decay", "adamw_eps")
        check_below_one(named, "adamw_betas")
        super().__init__(params, defaults, **shared)
        if not any(group["use_muon"] for group in self.param_groups):
            log.warning(
                "FusedMuon was given no matrix: AdamW trains all %d parameters. Some wrappers make vectors of them "
                "(FullyShardedDataParallel); train them unsharded, or use FusedAdamW",
                len(self.buckets.params),
            )

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "use_muon", "nesterov", "normuon")
        check_at_least_zero(group, "lr", "weight_decay", "momentum", "eps")
        check_below_one(group, "adamw_betas")
        check_below_one(group, "normuon_beta2")
        steps, coefficients = group["ns_steps"], group["ns_coefficients"]
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < _MOST_STEPS:
            raise ValueError(
                f"ns_steps must be a whole number from 0 to {_MOST_STEPS - 1}, got {spell(steps)}; the default is 5"
            )
        several = isinstance(coefficients, tuple) and len(coefficients) == 3
        if not several or not all(map(_is_finite, coefficients)):
            raise ValueError(
                f"ns_coefficients must be exactly 3 numbers that are finite, got {spell(coefficients)}; leave them out"
            )
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], (None, "original", "match_rms_adamw"))
        if not group["use_muon"]:
            return
        check_at_least_zero(group, "eps", at_most=torch.finfo(torch.float32).max)
        for name in ("eps", "normuon_beta2"):
            if isinstance(group[name], Tensor):
                raise ValueError(f"{name} of matrices must be a number, got a tensor; pass float({name})")
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
        own_names = {key: param_group[key] for key in _ADAMW_NUMBERS if key in param_group}
        make_plain(own_names)
        check_at_least_zero(own_names, *own_names)  # by the names that the user knows
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

        Raise ValueError, with nothing changed, if it does not fit, or if the other of Muon and AdamW trained a group.
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
            for param in (
                sorted(group["params"], key=lambda param: (tuple(param.shape), param.stride()))
                if group["use_muon"]
                else group["params"]
            )
        ]
        return Buckets(ordered, kind_of=lambda param: id(param) in by_muon)

    def _make_flat_group(self, *arguments: Any, shares_state: bool) -> FlatGroup:
        *_, groups, _, _ = arguments  # those of FlatGroup; table and options come last
        if self.param_groups[groups[0]]["use_muon"]:
            return MuonGroup(self._settings, *arguments, shares_state=shares_state)
        return FlatGroup("adamw", *arguments, shares_state=shares_state)

    def _settings(self, number: int) -> Orthogonal:
        group = self.param_groups[number]
        return Orthogonal(
            tuple(group["ns_coefficients"]),
            group["ns_steps"],
            float(group["eps"]),
            group["adjust_lr_fn"],
            group["normuon"],
            float(group["normuon_beta2"]),
        )


#: The keys of a group that are for AdamW, with their names in AdamW's group. Of two with one name the later one counts.
_ADAMW_NAMES = {
    "adamw_lr": "lr",
    "adamw_weight_decay": "weight_decay",
    "adamw_eps": "eps",
    "adamw_betas": "adamw_betas",
    "betas": "adamw_betas",
}


#: Those of them that are a number.
_ADAMW_NUMBERS = ("adamw_lr", "adamw_weight_decay", "adamw_eps")


def _is_finite(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _is_matrix(given: Any) -> bool:
    """Return whether a parameter, or a pair of its name and itself, is a matrix (in each replica of a stack)."""
    param = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    return isinstance(param, Tensor) and param.dim() - (replicas_of(param) is not None) == 2


class Orthogonal(NamedTuple):
    """How the updates of a parameter group are orthogonalised and scaled."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    adjust_lr_fn: str | None
    normuon: bool
    beta2: float

    def ratio(self, shape: Sequence[int]) -> float:
        """Return the factor of the learning rate for matrices of ``shape``, as torch.optim.Muon has it."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


@dataclass
class Piece:
    """Matrices of one shape and one parameter group that are orthogonalised together.

    Attributes:
        slots: their slots in the flat buffer, one after the other.
        part: the part of the flat buffer that has them.
        replicas: those replicas whose states these are; one where all share a state.
        update: [replicas · slots, rows, columns], a part of the scratch memory, for the update.
        push: for each replica the step that updates the momentum and writes the update.
        move: the step that moves the parameters by the update.
        row_squares: for each replica NorMuon's state, [slots, rows, 1].
        own_counts: the step counts of ``move``, [replicas, slots].
        counts: where they are kept between steps, if not in place.
    """

    slots: range
    part: Part
    replicas: range
    settings: Orthogonal
    update: Tensor
    push: list[ops.Step]
    move: ops.Step
    row_squares: list[Tensor]
    own_counts: Tensor
    counts: Tensor | None
    #: Of the last step: the table of all gradients, those of each replica, and the updates that stand for gradients.
    known: tuple[NDArray[np.int64] | None, list[NDArray[np.int64]], MatchedGradients | None] = (None, [], None)

    @property
    def places(self) -> slice:
        """Where its slots are among those of the part."""
        return slice(self.slots.start - self.part.slots.start, self.slots.stop - self.part.slots.start)


class MuonGroup(FlatGroup):
    """A flat buffer of matrices. Those of one shape and parameter group are neighbours in it.

    A step takes the matrices in pieces of at most :data:`PIECE_ELEMENTS` elements: one pass over gradient and momentum
    writes the update in bfloat16, Newton–Schulz orthogonalises the whole piece at once, and one pass over the
    parameters applies weight decay and update, in all replicas of a stack that share the gradient. ``settings_of``
    returns the settings of a parameter group by its number; the other arguments are those of :class:`FlatGroup`.
    """

    def __init__(self, settings_of: Callable[[int], Orthogonal], *arguments: Any, shares_state: bool) -> None:
        self._settings_of = settings_of
        super().__init__("muon", *arguments, shares_state=shares_state)

    def _lay_out(self, shares_state: bool) -> None:
        super()._lay_out(shares_state)
        self.states[ROW_SQUARES] = self.scales[ROW_SQUARES] = None
        self._pieces: list[Piece] = []
        self._settings: list[Orthogonal] = []
        ends = np.cumsum([0, *(slot.shape[0] for slot in self.slots)])
        self._row_slots = [
            Slot(slot.flat, int(end), slot.shape[0], (slot.shape[0], 1), (1, 1))
            for slot, end in zip(self.slots, ends, strict=False)
        ]
        self._row_count = int(ends[-1])

    @torch.inference_mode(False)
    def state_buffer(self, name: str) -> Tensor:
        """Return the flat buffer of state ``name``; the first call makes it, filled with zeros."""
        flat = self.states[name]
        if flat is not None:
            return flat
        self._pieces = []
        if name != ROW_SQUARES:
            return super().state_buffer(name)
        dtype = torch.float64 if self.flat.dtype == torch.float64 else torch.float32
        leading = (self.replicas,) if self._has_separate_states else ()
        flat = self.states[name] = torch.zeros((*leading, self._row_count), dtype=dtype, device=self.flat.device)
        return flat

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return slot ``index`` of a buffer laid out like the parameters, or of NorMuon's state."""
        if flat is self.states[ROW_SQUARES]:
            return self._row_slots[index].view(flat)
        return super().view(flat, index)

    def state_shape(self, name: str, index: int) -> tuple[int, ...]:
        """Return the shape that state ``name`` of slot ``index`` has for one replica."""
        return self._row_slots[index].shape if name == ROW_SQUARES else super().state_shape(name, index)

    def step(self, part: Part, grads: MatchedGradients, scalars: ops.Scalars) -> None:
        """Update the matrices of a part that have a gradient."""
        settings = [self._settings_of(group) for group in sorted(set(self.groups))]
        if not self._pieces or self._settings != settings or self._chosen_backend != chosen():
            self._settings, self._chosen_backend = settings, chosen()
            self._make_pieces()
        scalars = scalars.on(self.flat.device)
        # On the device, so that a captured graph reads the hyperparameters of its replay.
        torch.index_select(self.table.tensor, 0, self._row_of_slot, out=self._own_rows)
        self._own_rows.mul_(self._row_factors)
        if self.options.rounds_stochastically:
            self._push_steps.copy_(self.steps)
        for piece in self._pieces:
            if piece.part is part:
                self._step_piece(piece, grads, scalars)

    def _step_piece(self, piece: Piece, grads: MatchedGradients, scalars: ops.Scalars) -> None:
        if piece.known[0] is not grads.table:
            piece.known = (grads.table, *self._tables_of(piece, grads))
        _, tables, updates = piece.known
        if updates is None:
            return
        given = grads.tensors[piece.places]
        for push, replica, table in zip(piece.push, piece.replicas, tables, strict=True):
            own = given if self.replicas is None else [None if grad is None else grad[replica] for grad in given]
            push(MatchedGradients(own, table, any=True, permanent=grads.permanent), scalars)
        settings = piece.settings
        orthogonalise_(piece.update, settings.coefficients, settings.steps, settings.eps, backend=self._backend)
        if settings.normuon:
            keep = piece.move.chunks.point_at(updates)[:, 0] != NO_GRADIENT
            keep = keep if scalars.found_inf is None else keep & (scalars.found_inf <= 0)
            normalise_rows_(piece.update, piece.row_squares, settings.beta2, keep.view(-1, 1, 1))
        if piece.counts is not None:
            piece.own_counts.copy_(piece.counts)
        piece.move(updates, ops.Scalars(found_inf=scalars.found_inf))
        if piece.counts is not None:
            piece.counts.copy_(piece.own_counts)

    def _tables_of(
        self, piece: Piece, grads: MatchedGradients
    ) -> tuple[list[NDArray[np.int64]], MatchedGradients | None]:
        """Return the gradient table of the piece for each of its replicas, and its updates as gradients, if any."""
        there = [grad is not None for grad in grads.tensors[piece.places]]
        if not any(there):
            return [], None
        by_replica = grads.table.reshape(-1, len(piece.part.slots), 2)
        tables = [by_replica[replica, piece.places] for replica in piece.replicas]
        pairs = zip(piece.update.unbind(), there * len(piece.replicas), strict=True)
        updates = [update if has else None for update, has in pairs]
        return tables, replace(piece.move.chunks.match(updates), permanent=True)

    def _cut(self) -> list[range]:
        """Divide the slots into parts: one, or as many as there are pieces to orthogonalise."""
        if self.options.early is None:
            return super()._cut()
        starts = sorted({0, *(piece.start for piece in self._alike())})
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(self.slots)], strict=True)]

    def _alike(self) -> list[range]:
        """Return the slots that are orthogonalised at once: of one shape and group, as many as a piece may have."""

        def kind(index: int) -> tuple[Any, ...]:
            return self.groups[index], self.slots[index].shape, self.slots[index].stride

        found: list[range] = []
        for _, members in groupby(filter(lambda i: self.slots[i].numel, range(len(self.slots))), key=kind):
            slots = list(members)
            most = max(PIECE_ELEMENTS // self.slots[slots[0]].numel, 1)
            starts = range(0, len(slots), most)
            found += [range(slots[start], slots[min(start + most, len(slots)) - 1] + 1) for start in starts]
        return found

    @torch.inference_mode(False)
    def _make_pieces(self) -> None:
        """Divide the matrices into pieces, and bind the steps of each."""
        device, rows = self.flat.device, self.replicas or 1
        self._backend = resolve(device, self.options.backend)
        held = range(rows if self._has_separate_states else 1)
        ratios = [self._settings_of(g).ratio(slot.shape) for g, slot in zip(self.groups, self.slots, strict=True)]
        wide = self.table.tensor.dtype
        factors = torch.ones((len(self.slots), len(COLUMNS)), dtype=wide, device="cpu")
        factors[:, COLUMNS.index("lr")] = torch.tensor(ratios, dtype=wide, device="cpu")
        # Weight decay acts with the learning rate as it was.
        factors[:, COLUMNS.index("weight_decay")] = 1 / torch.tensor(ratios, dtype=wide, device="cpu")
        self._row_factors = factors.repeat(rows, 1).to(device)
        per_replica = self.table.tensor.shape[0] // rows
        rows_of = [replica * per_replica + group for replica in range(rows) for group in self.groups]
        self._row_of_slot = torch.tensor(rows_of, dtype=torch.int64, device=device)
        self._own_rows = torch.zeros_like(self._row_factors)
        self._push_steps = torch.zeros_like(self.steps)

        cuts: list[tuple[range, range]] = []
        for slots in self._alike():
            most = max(PIECE_ELEMENTS // self.slots[slots[0]].numel, 1)
            together = max(most // len(slots), 1)
            cuts += [(slots, held[first : first + together]) for first in range(0, len(held), together)]
        extents = [len(replicas) * len(slots) * self._pitch(slots) for slots, replicas in cuts]
        dtype = torch.float64 if self.flat.dtype == torch.float64 else torch.bfloat16
        scratch = torch.zeros(max(extents, default=0), dtype=dtype, device=device)
        self._pieces = [self._bind_piece(slots, replicas, scratch) for slots, replicas in cuts]

    def _pitch(self, numbers: range) -> int:
        """Return the elements from one matrix of a piece to the next."""
        if len(numbers) == 1:
            return self.slots[numbers[0]].numel
        return self.slots[numbers[1]].offset - self.slots[numbers[0]].offset

    def _bind_piece(self, numbers: range, replicas: range, scratch: Tensor) -> Piece:
        slots, pitch, part = self.slots[numbers.start : numbers.stop], self._pitch(numbers), self._part_of[numbers[0]]
        places = slice(numbers.start - part.slots.start, numbers.stop - part.slots.start)
        settings, extent = self._settings_of(self.groups[numbers.start]), len(numbers) * pitch
        per_replica = self.table.tensor.shape[0] // (self.replicas or 1)
        momentum = self.state_buffer("momentum_buffer")
        momentum = momentum.view(-1, momentum.shape[-1])
        scales = self.scales["momentum_buffer"]
        scales = None if scales is None else scales[part.blocks].view(len(momentum), -1)
        first, last = self._first_scales[numbers[0]], self._first_scales[numbers[-1]] + block_count(slots[-1].numel)
        before = self._first_scales[part.slots.start]
        first, last = first - before, last - before + -last % BLOCKS_PER_CHUNK
        push_counts = self._push_steps[part.steps].view(-1, len(part.slots))
        options = self.options
        push = []
        for place, replica in enumerate(replicas):
            span = slice(slots[0].offset, slots[-1].offset + slots[-1].numel)
            length = span.stop - span.start
            moved = [replace(slot, offset=number * pitch) for number, slot in enumerate(slots)]
            table_rows = [replica * per_replica + self.groups[index] for index in numbers]
            push.append(
                ops.Step(
                    "muon",
                    scratch[place * extent : place * extent + length],
                    [momentum[replica, span]],
                    push_counts[replica, places],
                    self.table.tensor,
                    ChunkTable(moved, table_rows, self.flat.device, scratch.dtype),
                    # A momentum in bfloat16 is rounded at random, and with it the update, by less than it is anyway.
                    stochastic_rounding=options.stochastic_rounding and momentum.dtype == torch.bfloat16,
                    backend=options.backend,
                    scales=() if scales is None else [scales[replica, first:last]],
                )
            )
        shared = self.replicas is not None and not self._has_separate_states and self.replicas > 1
        flats = [None if flat is None else flat if shared else flat.view(-1) for flat in (self.flat, self.master)]
        param, master = flats
        assert param is not None
        length = self.flat.shape[-1]
        moved = [replace(slot, offset=slot.offset + replica * length) for replica in replicas for slot in slots]
        table_rows = [replica * len(self.slots) + index for replica in replicas for index in numbers]
        counts = self.steps[part.steps].view(-1, len(part.slots))[replicas.start : replicas.stop, places]
        own_counts = counts.contiguous()  # of one replica, they are themselves
        move = ops.Step(
            "muon",
            param,
            [None],
            own_counts.view(-1),
            self._own_rows,
            ChunkTable(moved, table_rows, self.flat.device, self.flat.dtype),
            master=master,
            stochastic_rounding=options.stochastic_rounding,
            backend=options.backend,
            rows=param.shape[0] if param.dim() == 2 else 1,
        )
        update = scratch.as_strided((len(replicas) * len(slots), *slots[0].shape), (pitch, *slots[0].stride))
        squares: list[Tensor] = []
        if settings.normuon:
            flat = self.state_buffer(ROW_SQUARES)
            flat, count = flat.view(-1, flat.shape[-1]), slots[0].shape[0]
            start = self._row_slots[numbers.start].offset
            squares = [flat[r, start : start + count * len(slots)].view(len(slots), count, 1) for r in replicas]
        in_place = own_counts.data_ptr() == counts.data_ptr()
        return Piece(
            numbers, part, replicas, settings, update, push, move, squares, own_counts, None if in_place else counts
        )
