"""One rank of a training run, with everything that a user would have: model, optimizer, scheduler, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.chaos.configurations import SETTINGS, Configuration, Net, batch, network
from tests.chaos.record import digest
from tests.training import with_averaging

#: The parts of a replica, in the order in which a checkpoint is loaded unless a fault changes it.
PARTS = ("model", "optimizer", "scheduler")


@cache
def mesh_2x2(device: str) -> Any:
    """Ranks 0 and 1 are replica 0, ranks 2 and 3 replica 1. One mesh for a process: each has groups of its own."""
    return init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))


class Replica:
    """What one process holds of a run.

    Args:
        configuration: the kind of training.
        rank: of this process.
        device: of the tensors.
        options: of the scheduler, beside those of the configuration.
        change: edits the network before anything is built on it.
        params: returns what the optimizer is built with, from the network.
        optimizer: replaces that of the configuration.
        rows: replaces that of the configuration.
    """

    def __init__(
        self,
        configuration: Configuration,
        rank: int,
        device: str,
        *,
        options: dict[str, Any] | None = None,
        change: Callable[[Net], nn.Module] | None = None,
        params: Callable[[nn.Module], Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        rows: int | None = None,
    ) -> None:
        self.configuration, self.rank, self.device = configuration, rank, device
        traits = configuration.traits
        self.setting: Any = 1.0  # what the setter was last given
        self.in_probe: Callable[[], Any] | None = None
        self.in_setter: Callable[[], None] | None = None
        self.in_loss: Callable[[], None] | None = None
        self.stack: hk.ReplicaStack | None = None
        self.passes = 0  # through the model and back
        module: nn.Module = network() if change is None else change(network())
        module.to(device)
        if "masters" in traits:
            module.to(torch.bfloat16)
        self.module, self.model = module, module
        given: dict[str, Any] = {**SETTINGS, **configuration.options}
        if "stack" in traits:
            self.stack = hk.ReplicaStack(module, configuration.rows if rows is None else rows)
            given["ensemble"] = self.stack.ensemble
            own: Any = self.stack
        else:
            given["model"], own = module, module
            if "sharded" in traits:
                fully_shard(module, mesh=mesh_2x2(device))
                given["ensemble"] = hk.ProcessEnsemble(mesh_2x2(device))
            elif "shared" in traits:
                # Otherwise DDP deals its buckets anew after its first step: a resumed run then sums in another order.
                ddp = {"broadcast_buffers": False, "find_unused_parameters": "early" not in traits}
                self.model = DistributedDataParallel(module, **ddp)
        self.own = own
        chosen = list(own.named_parameters()) if params is None else params(own)
        early: dict[str, Any] = {}
        if "early" in traits and optimizer is None:
            wrapper = self.model if isinstance(self.model, DistributedDataParallel) else None
            early = {"max_grad_norm": 0.5, "in_backward": hk.InBackward("previous", wrapper, 40)}
        self.optimizer = (optimizer or configuration.optimizer)(chosen, lr=0.01, **early)
        if "probe" in traits:
            given["probe"] = self.probe
        if "setter" in traits:
            given["explore"] = [hk.Explore("temperature", spread=0.5, base=1.0, apply=self.set)]
        self.scheduler = hk.HDETOneCycleLR(self.optimizer, **with_averaging({**given, **(options or {})}))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    # What a user writes

    def set(self, value: Any) -> None:
        """Take the value of the explored scalar."""
        if self.in_setter is not None:
            self.in_setter()
        self.setting = value

    def probe(self) -> Any:
        """Return the loss on a batch that is the same for all replicas."""
        if self.in_probe is not None:
            found = self.in_probe()
            if found is not None:
                return found
        x, y = (part.to(self.device, self.dtype) for part in batch(0, 999))
        self.own.eval()  # BatchNorm's statistics are not those of the probe
        try:
            if self.stack is not None:
                return self.stack.losses(self.loss_of, x, y, same_batch=True)
            return self.loss_of(self.module, x, y)
        finally:
            self.own.train()

    def loss_of(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a model, which is the module, its DDP or a row of the stack."""
        if self.in_loss is not None:
            self.in_loss()
        return F.mse_loss(model(x), y)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the batch of this rank at this step."""
        first = self.configuration.replica_of(self.rank) if self.stack is not None else self.rank
        rows = self.stack.replicas if self.stack is not None else 1
        own = [batch(first + row, self.step) for row in range(rows)]
        x, y = (torch.cat(parts).to(self.device, self.dtype) for parts in zip(*own, strict=True))
        return x, y

    def backward(self, spoil: Callable[[Tensor], None] | None = None) -> Tensor:
        """Compute the gradients; return the loss, detached. ``spoil`` may edit the batch first."""
        self.passes += 1
        self.optimizer.zero_grad()
        x, y = self.batch()
        if spoil is not None:
            spoil(x)
        if self.stack is not None:
            return self.stack.backward(self.loss_of, x, y)
        loss = self.loss_of(self.model, x, y)
        loss.backward()
        return loss.detach()

    # What is compared

    @property
    def step(self) -> int:
        return int(self.scheduler.last_epoch)

    def parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in self.own.named_parameters()]

    def digests(self, *, gradients: bool = False) -> dict[str, str]:
        """Return the digest of every part. Without the scheduler's state while an average is under way."""
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        state = [effective(self.optimizer.state.get(param, {}), param) for _, param in self.parameters()]
        scheduler = self.scheduler
        of_scheduler: list[Any] = [self.step, scheduler.get_last_lr(), scheduler.get_base_lr(), self.history()]
        if scheduler.cycle.overlapping is None:
            saved = scheduler.state_dict()
            hdet = {**saved["hdet"][0], "history": None}
            hdet["summary"] = {**hdet["summary"], "seconds": 0, "bytes": 0, "collectives": 0}
            if not hdet["window"]["count"]:
                hdet["window"] = None  # the sum of no losses is 0 or [0, 0]
            of_scheduler.append({**saved, "hdet": hdet})
        parts: dict[str, Any] = {
            "parameters": [param for _, param in self.parameters()],
            "buffers": list(self.own.buffers()),
            "optimizer": [state, groups],
            "scheduler": of_scheduler,
            "setting": self.setting,
        }
        if gradients:
            parts["gradients"] = [param.grad for _, param in self.parameters()]
        return {name: digest(part) for name, part in parts.items()}

    def history(self) -> list[dict[str, Any]]:
        """The records of all syncs, without what they cost."""
        return [{**vars(record), "seconds": 0, "bytes": 0, "collectives": 0} for record in self.scheduler.history]

    def consensus(self) -> tuple[str, bool]:
        """Return the digest of everything that a sync makes equal, and whether the replicas held here are equal."""
        tensors = [value for value in self.own.state_dict().values() if isinstance(value, Tensor)]
        if "local" in self.configuration.traits:
            for _, param in self.parameters():
                state = self.optimizer.state.get(param, {})
                tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        if self.stack is None:
            return digest(tensors), True
        alike = all(torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in tensors)
        return digest([tensor[0] for tensor in tensors]), alike

    def vector(self) -> Tensor:
        """Return the parameters of the replicas held here, [rows, n], in float64."""
        flat = [local(param).detach().double().cpu() for _, param in self.parameters()]
        if self.stack is not None:
            return torch.cat([tensor.reshape(tensor.shape[0], -1) for tensor in flat], dim=1)
        return torch.cat([tensor.reshape(-1) for tensor in flat]).reshape(1, -1)

    def finite(self) -> bool:
        """Return whether parameters, buffers and optimizer state are finite."""
        state = [value for _, param in self.parameters() for value in self.optimizer.state.get(param, {}).values()]
        tensors = [*self.own.state_dict().values(), *state]
        return all(bool(local(tensor).isfinite().all()) for tensor in tensors if isinstance(tensor, Tensor))

    # Checkpoints

    def save(self, folder: Path, name: str) -> Path:
        """Write this rank's checkpoint; return the file."""
        parts = (self.own, self.optimizer, self.scheduler)
        torch.save({key: part.state_dict() for key, part in zip(PARTS, parts, strict=True)}, folder / name)
        return folder / name

    def load(self, states: dict[str, Any], order: tuple[str, ...] = PARTS) -> None:
        """Load the parts of a checkpoint, in this order."""
        targets = dict(zip(PARTS, (self.own, self.optimizer, self.scheduler), strict=True))
        for name in order:
            targets[name].load_state_dict(states[name])


def effective(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return the state of a parameter with its master as it is used: one that does not round to it is void."""
    if "master" not in state:
        return state
    master, value = state["master"], param.detach()
    used = torch.where(master.to(value.dtype) == value, master, value.to(master.dtype))
    return {**state, "master": used}


def local(tensor: Any) -> Tensor:
    """Return the part of a distributed tensor that this process holds."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
