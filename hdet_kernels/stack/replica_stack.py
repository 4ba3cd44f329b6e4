"""R replicas of a module on one device, trained together."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from hdet_kernels.converge.handshake import check_same_everywhere
from hdet_kernels.converge.summary import describe_layout
from hdet_kernels.converge.transport import run_transfers, take_first
from hdet_kernels.ensemble import Ensemble, RowEnsemble, default_ensemble
from hdet_kernels.stack.batch import Batch
from hdet_kernels.stack.gradients import Collector, LocalGradients, SharedGradients, empty_rows
from hdet_kernels.stack.graph import Graphs
from hdet_kernels.stack.hyper import StackHyper
from hdet_kernels.stack.losses import Losses, LossFunction
from hdet_kernels.stack.parameter import StackedParameter
from hdet_kernels.stack.template import Member, members, named_tensors, trained_members
from hdet_kernels.tensors import wide_dtype


class ReplicaStack:
    """Every parameter of ``module`` that requires a gradient becomes one of shape [R, *shape], and so does every
    buffer; row r is replica r's. All begin with the module's values. ::

        stack = hk.ReplicaStack(model, replicas=8)
        optimizer = hk.FusedAdamW(stack.parameters(), lr=1e-3)
        losses = stack.backward(lambda model, x, y: F.cross_entropy(model(x), y), x, y)   # [8]

    Frozen parameters have no rows: all replicas use the module's own. The module itself is the template: it is read at
    every loss (train or eval mode, dropout rates) and never trained.

    With several processes each holds R replicas of N = R·processes. All of them begin with the values of the first, as
    under DDP, and so do the module's frozen parameters.

    Args:
        replicas: R, those held here.
        gradients: ``"shared"``: one gradient for all, the mean over the replicas of all processes, as under DDP;
            ``grad`` shows it as an expanded view [R, *shape]. ``"local"``: a gradient for each, [R, *shape].
        ensemble: the processes that hold replicas. Default: the default process group if it is initialised.
        cuda_graphs: on a GPU, record :meth:`backward` as a CUDA graph when it is called for the third time with the
            same loss function and shapes, and replay it from then on: for models so small that the GPU waits for the
            host. What Python decides is then decided once, as are numbers that are not tensors (dropout rates): pass
            them as tensors of the batch or through ``hyper``. Each pass keeps the memory of its activations.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: int,
        *,
        gradients: Literal["shared", "local"] = "shared",
        ensemble: Ensemble | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        if not _is_count(replicas):
            raise ValueError(f"replicas must be a whole number of at least 1, got {replicas!r}")
        if cuda_graphs not in (True, False):
            raise ValueError(f"cuda_graphs must be True or False, got {cuda_graphs!r}")
        if gradients not in ("shared", "local"):
            raise ValueError(f"gradients must be 'shared' or 'local', got {gradients!r}")
        trained = trained_members(module)
        device = trained[0].tensor.device
        among = default_ensemble() if ensemble is None else ensemble
        self.ensemble = StackEnsemble(self, replicas, among)
        if among.talks and not among.serves(device):
            raise ValueError(f"tensors on {device} cannot travel among {among}: give it a backend for {device.type}")
        self.replicas, self.gradients, self.device = replicas, gradients, device
        self.hyper = StackHyper(replicas, device)
        self._template = module
        self._parameters: dict[tuple[str, ...], StackedParameter] = {
            member.names: StackedParameter(self._rows(member), shares_gradient=gradients == "shared")
            for member in trained
        }
        self._buffers: dict[tuple[str, ...], Tensor] = {
            member.names: self._rows(member) for member in members(module.named_buffers(remove_duplicate=False))
        }
        if among.processes > 1:
            self._begin_alike(among)
        params = list(self._parameters.values())
        self._collector: Collector = SharedGradients(params, among) if gradients == "shared" else LocalGradients(params)
        self._losses = Losses(module, self._parameters, self._buffers, self.hyper)
        self._graphs = Graphs(self._losses, self._collector, device) if cuda_graphs and device.type == "cuda" else None

    @torch.no_grad()
    def _rows(self, member: Member) -> Tensor:
        return empty_rows(member.tensor, self.replicas).copy_(member.tensor)

    @torch.no_grad()
    def _begin_alike(self, among: Ensemble) -> None:
        """Give all processes the values of the first."""
        stacked = [tensor for _, tensor in self._stacked()]
        names = {name for names, _ in self._stacked() for name in names}
        frozen = {name: param for name, param in self._template.named_parameters() if name not in names}
        first = [*(tensor[0] for tensor in stacked), *frozen.values()]
        layout = describe_layout(first, [*(names[0] for names, _ in self._stacked()), *frozen])
        same = "all processes must stack as many replicas of the same module"
        check_same_everywhere(
            among, {"replicas": self.replicas, "gradients": self.gradients, **layout}, "the stack", same
        )
        run_transfers([take_first(among, [tensor.detach() for tensor in first], np.ones(among.size, dtype=bool))])
        for tensor in stacked:
            tensor.copy_(tensor[0].clone())

    def parameters(self) -> Iterator[StackedParameter]:
        """The stacked parameters, each once: what an optimizer takes. Frozen ones are not among them."""
        return iter(self._parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, StackedParameter]]:
        """With the first of the names that they have in the module."""
        return ((names[0], parameter) for names, parameter in self._parameters.items())

    def buffers(self) -> Iterator[Tensor]:
        """The stacked buffers [R, *shape], each once."""
        return iter(self._buffers.values())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((names[0], buffer) for names, buffer in self._buffers.items())

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                (parameter.grad[0] if parameter.grad.stride(0) == 0 else parameter.grad).zero_()

    @property
    def training(self) -> bool:
        return self._template.training

    def train(self, mode: bool = True) -> ReplicaStack:
        """Put the module into training mode, which all replicas follow."""
        self._template.train(mode)
        return self

    def eval(self) -> ReplicaStack:
        return self.train(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As of DDP: :meth:`backward` inside the block does not average shared gradients over the processes; the next
        one outside averages all that has been accumulated."""
        if not isinstance(self._collector, SharedGradients):
            yield
            return
        before, self._collector.syncs = self._collector.syncs, False
        try:
            yield
        finally:
            self._collector.syncs = before

    def backward(
        self, loss_fn: LossFunction, *batch: Any, same_batch: bool = False, chunk_size: int | None = None
    ) -> Tensor:
        """The losses [R] of all replicas, detached; their gradients are added to ``grad`` of the parameters.

        ``loss_fn(model, *batch)`` is called once for all replicas under ``torch.func.vmap``: ``model`` is the module
        with the tensors of one replica, which it must use, and the result one number. Where vmap cannot follow (values
        that decide on what is computed, ``.item()``, activation checkpointing, LSTMs) it is called for one replica
        after the other, which the log says once. Random numbers differ between replicas.

        Tensors in ``batch`` are cut along dimension 0 into R equal slices, slice r for replica r; in any nesting of
        tuples, lists, dicts and registered classes. Tensors without dimensions and other objects go to all replicas.

        Args:
            same_batch: give all of the batch to every replica.
            chunk_size: how many replicas are computed at a time, to bound the memory of activations. Default: all.
        """
        if self._graphs is None:
            losses = self._compute(loss_fn, batch, same_batch, chunk_size, self._collector)
        else:
            _check(loss_fn, chunk_size)
            losses = self._graphs(loss_fn, batch, self.replicas, same_batch, chunk_size)
        with torch.no_grad():
            self._collector.commit()
        return losses

    def losses(
        self, loss_fn: LossFunction, *batch: Any, same_batch: bool = False, chunk_size: int | None = None
    ) -> Tensor:
        """The losses [R] as of :meth:`backward`, without gradients: for probes and validation."""
        return self._compute(loss_fn, batch, same_batch, chunk_size, None)

    def _compute(
        self,
        loss_fn: LossFunction,
        batch: tuple[Any, ...],
        same_batch: bool,
        chunk_size: int | None,
        gradients: Collector | None,
    ) -> Tensor:
        _check(loss_fn, chunk_size)
        return self._losses(loss_fn, Batch(batch, self.replicas, same_batch), chunk_size, gradients)

    def module(self) -> nn.Module:
        """A copy of the module with the mean of the replicas held here; those with numbers that are not finite are left
        out. Buffers of integers are those of the first sound replica."""
        sound = self._sound()
        if not sound.any():
            raise RuntimeError("no replica is sound: each has parameters or buffers that are not finite")
        rows = sound.nonzero().flatten()

        def mean(stacked: Tensor) -> Tensor:
            if not stacked.is_floating_point() and not stacked.is_complex():
                return stacked[rows[0]]
            wide = torch.promote_types(stacked.dtype, wide_dtype(stacked.device))
            return stacked[rows.to(stacked.device)].to(wide).mean(0)

        return self._copy({names: mean(stacked) for names, stacked in self._stacked()})

    def replica(self, r: int) -> nn.Module:
        """A copy of the module with the numbers of replica ``r`` of those held here."""
        if not -self.replicas <= r < self.replicas:
            raise IndexError(f"this stack holds replicas 0 to {self.replicas - 1}, got {r}")
        return self._copy({names: stacked[r] for names, stacked in self._stacked()})

    def state_dict(self) -> dict[str, Any]:
        """Under the module's own names: parameters and persistent buffers as [R, *shape], and as the module has them
        what has no rows."""
        return {name: value for name, (value, _) in self._state().items()}

    def _state(self) -> dict[str, tuple[Any, bool]]:
        """What the state_dict has, and whether it has rows."""
        state = self._template.state_dict(keep_vars=True)
        own = named_tensors(self._template)
        # By the tensors themselves: hooks of the module may have given them other names.
        rows = {id(own[name]): stacked.detach() for names, stacked in self._stacked() for name in names}
        return {
            name: (rows[id(value)], True)
            if id(value) in rows
            else (value.detach() if isinstance(value, Tensor) else value, False)
            for name, value in state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> _IncompatibleKeys:
        """Load what :meth:`state_dict` gave; or the ``state_dict`` of a plain module, which goes to all replicas."""
        own = self._state()
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        wrong = []
        for name, (tensor, has_rows) in own.items():
            value = state_dict.get(name)
            if name not in state_dict or not isinstance(tensor, Tensor):
                continue
            shapes = [tensor.shape, tensor.shape[1:]] if has_rows else [tensor.shape]
            if not isinstance(value, Tensor) or value.shape not in shapes:
                given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                wrong.append(f"{name} is {given}, expected {' or '.join(str(tuple(shape)) for shape in shapes)}")
        if strict and (missing or unexpected):
            wrong += [f"missing: {', '.join(missing)}"] * bool(missing)
            wrong += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        if wrong:
            raise RuntimeError(f"the state_dict does not fit a stack of {self.replicas} replicas: {'; '.join(wrong)}")
        for name, (tensor, _) in own.items():
            if name in state_dict and isinstance(tensor, Tensor):
                tensor.copy_(state_dict[name])
            elif name in state_dict:
                owner = name.removesuffix("_extra_state").removesuffix(".")
                self._template.get_submodule(owner).set_extra_state(state_dict[name])
        return _IncompatibleKeys(missing, unexpected)

    def _stacked(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        yield from self._parameters.items()
        yield from self._buffers.items()

    @torch.no_grad()
    def _copy(self, values: Mapping[tuple[str, ...], Tensor]) -> nn.Module:
        # Tensors that hang in a graph cannot be copied; torch.nn.utils.weight_norm leaves some as attributes.
        attributes = (value for part in self._template.modules() for value in vars(part).values())
        computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
        made = copy.deepcopy(self._template, {id(value): value.detach().clone() for value in computed})
        tensors = named_tensors(made)
        for names, value in values.items():
            for name in names:
                tensors[name].copy_(value)
        return made

    @torch.no_grad()
    def _sound(self) -> Tensor:
        """[R]: which replicas are finite. A buffer may be what it is not where the module's own is not: masks are."""
        sound = torch.ones(self.replicas, dtype=torch.bool, device=self.device)
        own = dict(self._template.named_buffers(remove_duplicate=False))
        for names, stacked in self._stacked():
            finite = stacked.isfinite()
            if names[0] in own:
                finite |= ~own[names[0]].isfinite()
            sound &= finite.unsqueeze(-1).flatten(1).all(1).to(self.device)
        return sound

    def __repr__(self) -> str:
        elements = sum(parameter[0].numel() for parameter in self.parameters())
        return (
            f"ReplicaStack({self.replicas} × {type(self._template).__name__} of {elements} parameters, "
            f"{self.gradients} gradients, on {self.device})"
        )


class StackEnsemble(RowEnsemble):
    """The replicas of a stack, and as many in each process of ``among``; with the stack itself, whose buffers are
    averaged and whose ``hyper`` takes explored scalars."""

    def __init__(self, stack: ReplicaStack, replicas: int, among: Ensemble) -> None:
        super().__init__(replicas, among)
        self.stack = stack


def _check(loss_fn: object, chunk_size: object) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(model, *batch), got a {type(loss_fn).__name__}")
    if chunk_size is not None and not _is_count(chunk_size):
        raise ValueError(f"chunk_size must be a whole number of at least 1, or None, got {chunk_size!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
