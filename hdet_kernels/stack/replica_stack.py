"""The public class of a stack: R replicas of a module on one device, trained together."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_callable, check_choice, check_flag, check_kind, check_whole
from hdet_kernels.converge.handshake import check_same_everywhere
from hdet_kernels.converge.summary import describe_layout
from hdet_kernels.converge.transport import run_transfers, take_first
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, RowEnsemble, check_ensemble, settled_ensemble
from hdet_kernels.module_hooks import add_hook
from hdet_kernels.ops.pack import MOST_ROWS
from hdet_kernels.stack.gradients import Collector, LocalGradients, SharedGradients, TeamGradients
from hdet_kernels.stack.inputs import Batch, StackHyper
from hdet_kernels.stack.losses import GraphedLosses, LossFunction, ReplicaLosses
from hdet_kernels.stack.template import (
    NamedTensors,
    StackedParameter,
    copy_module,
    empty_rows,
    merge_tied,
    tensors_by_name,
    trainable_parameters,
)
from hdet_kernels.tensors import compact, wide_dtype
from hdet_kernels.torch_internals import times_written, uncompiled

log = logging.getLogger("hdet_kernels")


class ReplicaStack:
    """R replicas of ``module`` on one device.

    Every parameter of ``module`` that requires a gradient becomes one of shape [R, *shape], and so does every buffer;
    row r belongs to replica r. All replicas begin with the module's values. ::

        stack = hk.ReplicaStack(model, replicas=8)
        optimizer = hk.FusedAdamW(stack.parameters(), lr=1e-3)
        losses = stack.backward(lambda model, x, y: F.cross_entropy(model(x), y), x, y)   # [8]

    Frozen parameters have no rows: all replicas use the module's own. The module itself is the template. It is read at
    every loss (train or eval mode, dropout rates) and never trained: :meth:`module` returns the trained one. Calling or
    saving the template after the first step warns once.

    With several processes each holds R of N = R·processes replicas. All begin with the values of the first process, as
    under DDP. So do the module's frozen parameters.

    Args:
        module: the template.
        replicas: R, the number of replicas in this process.
        gradients: ``"shared"``: one gradient for all replicas, the mean over the replicas of all processes, as under
            DDP; ``grad`` shows it as an expanded view [R, *shape]. ``"local"``: one gradient for each replica,
            [R, *shape].
        ensemble: the processes that hold replicas. Default: the default process group if it is initialised.
        cuda_graphs: on a GPU, record :meth:`backward` as a CUDA graph when it is called for the third time with the
            same loss function and shapes, and replay it from then on. Use it for models so small that the GPU waits for
            the host. Python code of the loss and the modules is then not executed again: pass numbers that change
            (dropout rates) as tensors of the batch or through ``hyper``. Each recorded pass keeps the memory of its
            activations.

    Attributes:
        hyper: hyperparameters that act in the loss, one value per replica (:class:`StackHyper`).
        ensemble: the replicas of all processes, for a scheduler's ``ensemble=``.
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
        replicas = check_whole("replicas", replicas, at_least=1)
        if replicas > MOST_ROWS:
            raise ValueError(
                f"at most {MOST_ROWS} replicas of one process are averaged, got {replicas}: stack fewer, in several "
                "processes if need be"
            )
        cuda_graphs = check_flag("cuda_graphs", cuda_graphs)
        check_choice("gradients", gradients, ("shared", "local"))
        if ensemble is not None:
            check_ensemble("ensemble", ensemble)
        trained = trainable_parameters(module)
        device = next(iter(trained.values())).device
        among = settled_ensemble("ReplicaStack") if ensemble is None else ensemble
        self.ensemble = StackEnsemble(self, replicas, among)
        if among.talks and not among.serves(device):
            raise ValueError(
                f"the module is on {device}, but {among} has no backend for {device.type}: initialise the process "
                "group with one"
            )
        self.replicas, self.gradients, self.device = replicas, gradients, device
        self.hyper = StackHyper(replicas, device)
        self._load_hooks: OrderedDict[int, Callable[[ReplicaStack, Any], None]] = OrderedDict()
        self._module, self._template, self._told = module, trained, False
        self._uses_module, self._before, self._hooks = False, (0, 0), list[RemovableHandle]()
        self._parameters: dict[tuple[str, ...], StackedParameter] = {
            names: StackedParameter(self._rows_of(param), shares_gradient=gradients == "shared")
            for names, param in trained.items()
        }
        self._buffers: dict[tuple[str, ...], Tensor] = {
            names: self._rows_of(buffer)
            for names, buffer in merge_tied(module.named_buffers(remove_duplicate=False)).items()
        }
        if among.processes > 1:
            self._begin_alike(among)
        self._losses = ReplicaLosses(module, self._parameters, self._buffers, self.hyper)
        self._among, self._records = among, cuda_graphs and device.type == "cuda"
        self._collector: Collector
        self._graphed: GraphedLosses | None
        self._collect(gradients, self._collector_of(gradients))

    def _collect(self, mode: Literal["shared", "local", "team"], collector: Collector) -> None:
        self._mode, self._collector = mode, collector
        self._graphed = GraphedLosses(self._losses, collector, self.device) if self._records else None

    def _collector_of(self, gradients: Literal["shared", "local"]) -> Collector:
        params = list(self._parameters.values())
        return SharedGradients(params, self._among) if gradients == "shared" else LocalGradients(params)

    def own_gradients(self, own: bool) -> None:
        """Let :meth:`backward` compute one gradient for each replica for a while, or those of :attr:`gradients` again.

        Gradients that were computed before are removed, and CUDA graphs are recorded anew. The optimizer must give
        every replica a state of its own meanwhile (``optimizer.separate_state()``).
        """
        wanted: Literal["shared", "local"] = "local" if own else self.gradients
        if self._mode != wanted:
            self._switch(wanted, self._collector_of(wanted))

    def team_gradients(self, first: int) -> None:
        """Let :meth:`backward` give every replica the mean gradient of its team for a while, as :meth:`own_gradients`.

        Collective. The first of two teams has ``first`` replicas, over all processes. Where there are several of these,
        each belongs to a team with all of its replicas.
        """
        if self._mode != "team":
            params = list(self._parameters.values())
            team: Collector = TeamGradients(params, first)
            if isinstance(self._among, ProcessEnsemble):
                team = SharedGradients(params, self._among.team(first // self.replicas))
            self._switch("team", team)

    def _switch(self, mode: Literal["shared", "local", "team"], collector: Collector) -> None:
        for parameter in self.parameters():
            parameter.shares_gradient, parameter.grad = isinstance(collector, SharedGradients), None
            parameter.gradient_version = None
        self._collect(mode, collector)

    @torch.no_grad()
    def _rows_of(self, tensor: Tensor) -> Tensor:
        return empty_rows(tensor, self.replicas).copy_(tensor)

    @torch.no_grad()
    def _begin_alike(self, among: Ensemble) -> None:
        """Copy the values of the first process to all."""
        stacked = [tensor for _, tensor in self._stacked()]
        names = {name for names, _ in self._stacked() for name in names}
        frozen = {name: param for name, param in self._module.named_parameters() if name not in names}
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
        """Return the stacked parameters, each once, for an optimizer. Frozen parameters are not among them."""
        return iter(self._parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, StackedParameter]]:
        """Return the stacked parameters, each with the first of its names in the module."""
        return ((names[0], parameter) for names, parameter in self._parameters.items())

    def buffers(self) -> Iterator[Tensor]:
        """Return the stacked buffers [R, *shape], each once."""
        return iter(self._buffers.values())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return the stacked buffers, each with the first of its names in the module."""
        return ((names[0], buffer) for names, buffer in self._buffers.items())

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of all parameters, or set them to zero."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                (parameter.grad[0] if parameter.grad.stride(0) == 0 else parameter.grad).zero_()

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._module.training

    def train(self, mode: bool = True) -> ReplicaStack:
        """Put the module, and with it all replicas, into training or evaluation mode."""
        self._module.train(mode)
        return self

    def eval(self) -> ReplicaStack:
        """Put the module, and with it all replicas, into evaluation mode."""
        return self.train(False)

    # The module itself, which nobody trains

    @contextlib.contextmanager
    def _using_module(self) -> Iterator[None]:
        """Say nothing of what the stack itself does with the module inside the block."""
        before, self._uses_module = self._uses_module, True
        try:
            yield
        finally:
            self._uses_module = before

    def _watch_module(self) -> None:
        """Notice from now on who calls the module or saves it."""
        self._before, module = self._times_written(), uncompiled(self._module)
        for register in (module.register_forward_pre_hook, module.register_state_dict_pre_hook):
            self._hooks.append(add_hook(register, self._before_use))

    def _times_written(self) -> tuple[int, int]:
        """Return how often the module's own parameters and those of the replicas were written."""
        both = self._template.values(), self._parameters.values()
        own, rows = (sum(times_written(param) for param in each if not param.is_inference()) for each in both)
        return own, rows

    def _before_use(self, *_: object) -> None:
        """Warn, once, that the module is not trained, if the replicas are. A hook of the module."""
        if self._uses_module or self._told:
            return
        # Without an operation on tensors: somebody may be tracing the module, or capturing a CUDA graph of it.
        own, (written, trained) = tensors_by_name(self._module), self._times_written()
        replaced = any(own.get(names[0]) is not param for names, param in self._template.items())
        # Somebody may have given it other values, as those of a trained copy.
        if not replaced and written == self._before[0] and trained != self._before[1]:
            self._told = True
            log.warning(
                "the %s that ReplicaStack was made of is called or saved, and it is not trained: the stack trains "
                "copies of its parameters. Use stack.module(), which has the mean of the replicas, or stack.replica(r)",
                type(uncompiled(self._module)).__name__,
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate shared gradients without averaging them over the processes, like ``no_sync`` of DDP.

        The next :meth:`backward` after the block averages everything that has been accumulated.
        """
        before, self._collector.syncs = self._collector.syncs, False
        try:
            yield
        finally:
            self._collector.syncs = before

    def backward(
        self, loss_fn: LossFunction, *batch: Any, same_batch: bool = False, chunk_size: int | None = None
    ) -> Tensor:
        """Compute the losses of all replicas and add their gradients to ``grad`` of the parameters.

        ``loss_fn(model, *batch)`` is called once for all replicas under ``torch.func.vmap``. Where vmap cannot follow
        (control flow that depends on values, ``.item()``, activation checkpointing, LSTMs) it is called for one replica
        after another, and a warning is logged once. Random numbers differ between replicas.

        Args:
            loss_fn: returns one number. Its first argument is the module with the tensors of one replica; it must use
                that one.
            *batch: tensors, in any nesting of tuples, lists, dicts and registered classes, are cut along dimension 0
                into R equal slices, slice r for replica r. Tensors without dimensions and other objects go to all
                replicas.
            same_batch: give the whole batch to every replica.
            chunk_size: how many replicas are computed at a time, to bound the memory of activations. Default: all.

        Returns:
            The losses [R], detached.

        Raises:
            RuntimeError: in the first pass by ``loss_fn``, gradients are not finite where the losses are (a warning if
                the model computes in fp16). Nothing is changed then.
        """
        whole = self._batch(loss_fn, batch, same_batch, chunk_size)
        if not self._hooks:
            self._watch_module()
        with self._using_module():
            if self._graphed is None:
                losses = self._losses.compute(loss_fn, whole, chunk_size, self._collector)
            else:
                losses = self._graphed.compute(loss_fn, whole, same_batch, chunk_size)
        with torch.no_grad():
            self._collector.commit()
        return losses

    def losses(
        self, loss_fn: LossFunction, *batch: Any, same_batch: bool = False, chunk_size: int | None = None
    ) -> Tensor:
        """Return the losses [R] without computing gradients, for probes and validation.

        The arguments are those of :meth:`backward`.
        """
        whole = self._batch(loss_fn, batch, same_batch, chunk_size)
        with self._using_module():
            return self._losses.compute(loss_fn, whole, chunk_size, None)

    def _batch(self, loss_fn: object, batch: tuple[Any, ...], same_batch: bool, chunk_size: int | None) -> Batch:
        """Return the batch; raise if an argument of :meth:`backward` is wrong."""
        check_callable("loss_fn", loss_fn, "loss_fn(model, *batch)", remedy="the batch comes after it")
        check_flag("same_batch", same_batch)
        if chunk_size is not None:
            check_whole("chunk_size", chunk_size, at_least=1)
        return Batch(batch, self.replicas, same_batch)

    def module(self) -> nn.Module:
        """Return a copy of the module with the mean of the replicas in this process.

        Replicas with non-finite parameters or buffers are left out; if all have some, RuntimeError is raised. Integer
        buffers are those of the first finite replica.
        """
        stacked = dict(self._stacked())
        finite = self._finite(stacked)
        if not finite.any():
            raise RuntimeError(
                "no replica is finite: each has NaN or infinity in its parameters or buffers; load a checkpoint"
            )
        rows = finite.nonzero().flatten()

        def mean(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() and not tensor.is_complex():
                return tensor[rows[0]]
            wide = torch.promote_types(tensor.dtype, wide_dtype(tensor.device))
            return tensor[rows.to(tensor.device)].to(wide).mean(0)

        return self._copy({names: mean(tensor.detach()) for names, tensor in stacked.items()})

    def _copy(self, values: NamedTensors) -> nn.Module:
        return copy_module(self._module, values, without=self._hooks)

    @torch.no_grad()
    def _finite(self, stacked: Mapping[tuple[str, ...], Tensor]) -> Tensor:
        """Return [R], which replicas are finite; buffers may be non-finite where the module's are (attention masks)."""
        finite_rows = torch.ones(self.replicas, dtype=torch.bool, device=self.device)
        own = dict(self._module.named_buffers(remove_duplicate=False))
        for names, tensor in stacked.items():
            finite = tensor.isfinite()
            if names[0] in own:
                finite |= ~own[names[0]].isfinite()
            finite_rows &= finite.unsqueeze(-1).flatten(1).all(1).to(self.device)
        return finite_rows

    def replica(self, r: int) -> nn.Module:
        """Return a copy of the module with the values of replica ``r`` of this process."""
        r = check_whole("the number of a replica", r)
        if not -self.replicas <= r < self.replicas:
            raise IndexError(f"this stack holds replicas 0 to {self.replicas - 1}, got {r}")
        return self._copy({names: stacked[r] for names, stacked in self._stacked()})

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the module's own names.

        Parameters and persistent buffers are [R, *shape]. Entries without rows (frozen parameters, extra state) are the
        module's own. Parameters in the flat buffer of an optimizer are copied, since a file would hold the others there
        as well. Tied tensors share their copy.
        """
        entries = self._entries()
        copies = {id(value): compact(value) for value, has_rows in entries.values() if has_rows}
        return {name: copies.get(id(value), value) for name, (value, _) in entries.items()}

    def _entries(self) -> dict[str, tuple[Any, bool]]:
        """Return the entries of the module's ``state_dict``, with rows where there are, and whether there are."""
        own = tensors_by_name(self._module)
        # Matched by the tensors themselves, since hooks of the module may have renamed the entries.
        rows = {id(own[name]): tensor.detach() for names, tensor in self._stacked() for name in names}
        found: dict[str, tuple[Any, bool]] = {}
        with self._using_module():
            entries = self._module.state_dict(keep_vars=True)
        for name, value in entries.items():
            plain = value.detach() if isinstance(value, Tensor) else value
            found[name] = (rows[id(value)], True) if id(value) in rows else (plain, False)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the :meth:`state_dict` of a stack, or of a plain module, which then goes to all replicas.

        Returns:
            Missing and unexpected keys, as ``nn.Module.load_state_dict`` does.

        Raises:
            RuntimeError: a shape does not fit, or keys do not and ``strict`` is set. Nothing is changed then.
        """
        check_kind("state_dict", state_dict, Mapping, "a dict of tensors, as stack.state_dict() returns it")
        strict = check_flag("strict", strict)
        own = self._entries()
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        wrong = []
        for name, (tensor, has_rows) in own.items():
            if name in missing or not isinstance(tensor, Tensor):
                continue
            value = state_dict[name]
            shapes = [tensor.shape, tensor.shape[1:]] if has_rows else [tensor.shape]
            if not isinstance(value, Tensor) or value.shape not in shapes:
                given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                wrong.append(f"{name} is {given}, expected {' or '.join(str(tuple(shape)) for shape in shapes)}")
        if strict:
            wrong += [f"missing: {', '.join(missing)}"] * bool(missing)
            wrong += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        if wrong:
            raise RuntimeError(f"the state_dict does not fit a stack of {self.replicas} replicas: {'; '.join(wrong)}")
        for name in (name for name in own if name in state_dict):
            tensor = own[name][0]
            if isinstance(tensor, Tensor):
                tensor.copy_(state_dict[name])
            else:
                owner = name.removesuffix("_extra_state").removesuffix(".")
                self._module.get_submodule(owner).set_extra_state(state_dict[name])
        result = nn.Module().load_state_dict({})  # torch's result, whose type has no public name
        result.missing_keys.extend(missing)
        result.unexpected_keys.extend(unexpected)
        for hook in list(self._load_hooks.values()):
            hook(self, result)
        return result

    def register_load_state_dict_post_hook(self, hook: Callable[[ReplicaStack, Any], None]) -> RemovableHandle:
        """Call ``hook(stack, result)`` after :meth:`load_state_dict`, as that of ``nn.Module`` does."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def _stacked(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        yield from self._parameters.items()
        yield from self._buffers.items()

    def __repr__(self) -> str:
        elements = sum(parameter[0].numel() for parameter in self.parameters())
        return (
            f"ReplicaStack({self.replicas} × {type(self._module).__name__} of {elements} parameters, "
            f"{self.gradients} gradients, on {self.device})"
        )


class StackEnsemble(RowEnsemble):
    """The replicas of a stack, and as many in each process of ``among``.

    Schedulers find the stack itself here: they average its buffers and write explored scalars to its ``hyper``.
    """

    def __init__(self, stack: ReplicaStack, replicas: int, among: Ensemble) -> None:
        super().__init__(replicas, among)
        self.stack = stack
