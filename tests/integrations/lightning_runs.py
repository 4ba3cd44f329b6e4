"""Runs of Lightning's Trainer that tests look at. Imported in the ranks only: the import of Lightning takes seconds."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import hdet_kernels as hk
from hdet_kernels.integrations.lightning import HDET, check_strategy

# Lightning advises on numbers of workers and on logging intervals, which tests choose for speed.
warnings.filterwarnings("ignore", module="lightning")

T = 4  # steps between syncs
WIDTH = 6
CLIP = 0.05


class World(LightningEnvironment):
    """The ranks that the tests started, in the process group that they have."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class CountingOneCycle(hk.HDETOneCycleLR):
    """Notes how many losses were recorded before each step."""

    def step(self, *args: Any) -> None:  # type: ignore[override]
        if self._cycle is not None:
            self.__dict__.setdefault("seen", []).append(self.cycle.window.count)
        super().step(*args)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "seen"}


class Net(pl.LightningModule):
    """A small network that notes what Lightning shows it."""

    def __init__(
        self,
        *,
        steps: int,
        optimizer: Callable[..., torch.optim.Optimizer] = hk.FusedAdamW,
        make: Callable[..., Any] = CountingOneCycle,
        config: dict[str, Any] | None = None,
        max_lr: float | None = 0.02,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
        self.steps, self.make_optimizer, self.make, self.max_lr = steps, optimizer, make, max_lr
        self.config = {"interval": "step"} if config is None else config
        self.options = {"sync_every": T, "auto_lr": False, **options}
        self.error = MeanMetric()
        self.losses: list[float] = []
        self.validated: list[Tensor] = []
        self.trained: list[Tensor] = []
        self.norms: list[float] = []
        self.errors: list[float] = []
        self.scheduler: Any = None
        self.fails_in = ""

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained.append(flat(self))
        if self.fails_in in ("training_step", "interrupt") and self.global_step == 6:
            raise ZeroDivisionError if self.fails_in == "training_step" else KeyboardInterrupt
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], i: int) -> Tensor:
        if i == 0:
            self.validated.append(flat(self))
        if self.fails_in == "validation_step" and self.global_step == 6:
            raise ZeroDivisionError
        loss = self.loss(batch)
        self.error(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_error", self.error)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.errors.append(self.error.compute().item())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:  # those of the step before
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def moments(self) -> Tensor:
        state = self.optimizers(use_pl_optimizer=False).state
        return torch.cat([state[p]["exp_avg"].reshape(-1) for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters(), lr=0.01)
        self.scheduler = self.make(optimizer, self.max_lr, self.steps, model=self.trainer.model, **self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, **self.config}}


class Manual(Net):
    """The same with manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step(loss)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def data(batches: int, seed: int = 0, size: int = 8) -> DataLoader[Any]:
    """Return a loader with this many batches for each of two ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * batches * size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1, keepdim=True) / 2).sin()), batch_size=size)


def trainer(*callbacks: pl.Callback, hdet: HDET | None = None, **options: Any) -> pl.Trainer:
    """Return a trainer on the ranks that the tests started."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 1}
    strategy = DDPStrategy(cluster_environment=World())
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        quiet["enable_checkpointing"] = False
    options = {"strategy": strategy, "accelerator": "cpu", "devices": dist.get_world_size(), **quiet, **options}
    return pl.Trainer(callbacks=[hdet or HDET(), *callbacks], **options)


def everyones(own: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def saved(path: Path) -> Tensor:
    """Return the parameters in a checkpoint."""
    state = torch.load(path, weights_only=False)["state_dict"]
    return torch.cat([value.reshape(-1) for value in state.values()])


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """Train with accumulation, mixed precision, clipping, validation and checkpoints at all places in a cycle."""
    net = Net(steps=12)
    steps = ModelCheckpoint(folder / "steps", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    weights = ModelCheckpoint(folder / "weights", every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
    weights.filename = "{step}"
    best = ModelCheckpoint(folder / "best", filename="{step}", monitor="val_loss", save_top_k=-1)
    logger = CSVLogger(folder, name="logs", version="", flush_logs_every_n_steps=1)
    fit = trainer(
        steps,
        weights,
        best,
        LearningRateMonitor(),
        logger=logger,
        log_every_n_steps=1,
        max_steps=12,
        accumulate_grad_batches=2,
        val_check_interval=3,
        precision="bf16-mixed",
        gradient_clip_val=CLIP,
    )
    fit.fit(net, data(12), data(2, seed=1))
    files = {name: sorted((folder / name).iterdir()) for name in ("steps", "weights", "best")}
    with open(folder / "logs/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        "losses": net.losses,
        "windows": [record.losses[rank] for record in net.scheduler.history],
        "steps": [record.step for record in net.scheduler.history],
        "gradients": [record.gradients for record in net.scheduler.history],
        "seen": net.scheduler.seen,
        "norms": net.norms,
        "trained": net.trained,
        "validated": net.validated,
        "saved": {name: {int(path.stem.split("=")[1]): saved(path) for path in paths} for name, paths in files.items()},
        "parameters": flat(net),
        "tested": fit.test(net, data(2, seed=1), verbose=False),
        "rows": rows,
        "save": "save_checkpoint" in vars(fit),
    }


def scaled(rank: int, folder: Path) -> dict[str, Any]:
    """Train in fp16 with a GradScaler, with clipping and without."""
    found = {}
    for clip in (CLIP, None):
        net = Net(steps=8)
        precision = MixedPrecision("16-mixed", "cpu")
        trainer(plugins=precision, max_steps=8, gradient_clip_val=clip, limit_val_batches=0).fit(net, data(8))
        assert precision.scaler is not None
        windows = [record.losses[rank] for record in net.scheduler.history]
        found["clip" if clip else "plain"] = {
            "losses": net.losses,
            "windows": windows,
            "norms": net.norms,
            "scale": precision.scaler.get_scale(),
            "parameters": flat(net),
        }
    return found


def early_stop(rank: int, folder: Path) -> dict[str, Any]:
    """Stop in the middle of a cycle: by EarlyStopping, by max_steps, by should_stop."""

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 6

    ends = {
        "EarlyStopping": ([EarlyStopping("val_loss", mode="max", patience=1)], {"val_check_interval": 3}),
        "max_steps": ([], {"max_steps": 6}),
        "should_stop": ([Stop()], {"limit_val_batches": 0}),
    }
    found = {}
    for name, (callbacks, options) in ends.items():
        net = Net(steps=24)
        trainer(*callbacks, **{"max_epochs": 2, **options}).fit(net, data(12), data(2, seed=1))
        record = net.scheduler.history[-1]
        found[name] = {"parameters": flat(net), "steps": net.scheduler.last_epoch, "kind": record.kind}
    return found


def resume(rank: int, folder: Path) -> dict[str, Any]:
    """Train 4 epochs, and again from the checkpoints of the second: at a sync, and one step after."""
    found = {}
    for name, epoch in (("at a sync", T), ("in a cycle", T + 1)):
        whole, resumed = (Net(steps=4 * epoch, auto_lr=True, pct_start=0.7) for _ in range(2))
        keep = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
        trainer(keep, max_epochs=4).fit(whole, data(epoch), data(2, seed=1))
        path = folder / name / "epoch=1.ckpt"
        trainer(max_epochs=4).fit(resumed, data(epoch), data(2, seed=1), ckpt_path=path)
        found[name] = [
            {
                "parameters": flat(net),
                "losses": net.losses[-2 * epoch :],
                "trained": net.trained[-2 * epoch :],
                "base": [record.base for record in net.scheduler.history],
                "moments": net.moments(),
                "steps": net.scheduler.last_epoch,
            }
            for net in (whole, resumed)
        ]
        found[name][1]["saved"] = saved(path)
    return found


def failures(rank: int, folder: Path) -> dict[str, Any]:
    """Raise in training and in validation, on both ranks, in the middle of a cycle."""
    found = {}
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    for where in ("training_step", "validation_step", "interrupt"):
        net = Net(steps=24)
        net.fails_in = where
        fit = trainer(max_steps=24, val_check_interval=6)
        try:
            fit.fit(net, data(12), data(2, seed=1))
        except (ZeroDivisionError, SystemExit):  # Lightning exits when it is interrupted
            held = net.scheduler.cycle.in_consensus
            found[where] = {"parameters": flat(net), "held": held, "save": "save_checkpoint" in vars(fit)}
            found[where]["told"] = told.copy()
            told.clear()
    logging.getLogger("hdet_kernels").removeHandler(handler)
    return found


def refusals(rank: int, folder: Path) -> dict[str, str]:
    """Return the messages for what cannot work."""
    nets = {
        "epoch": Net(steps=8, config={}),
        "frequency": Net(steps=8, config={"interval": "step", "frequency": 2}),
        "none": Net(steps=8, make=lambda optimizer, *_, **__: torch.optim.lr_scheduler.StepLR(optimizer, 2)),
        "zero": Net(
            steps=8,
            optimizer=lambda params, lr: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=lr),
            cycle_momentum=False,
        ),
    }
    found = {}
    for name, net in nets.items():
        try:
            trainer(max_steps=8).fit(net, data(8))
        except (ValueError, RuntimeError, TypeError) as error:
            found[name] = str(error)
    wrong: dict[str, dict[str, Any]] = {
        "probe": {"probe": "validation"},
        "no module": {"probe": lambda: 0.0},
        "log": {"log": 1},
    }
    for name, options in wrong.items():
        try:
            HDET(**options)
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    try:
        check_strategy(DDPStrategy(model_averaging_period=2))
    except ValueError as error:
        found["model averaging"] = str(error)
    for kind in (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy):
        try:
            check_strategy(kind.__new__(kind))  # some cannot be built on this machine
        except ValueError as error:
            found[kind.__name__] = str(error)
    return found


def manual(rank: int, folder: Path) -> dict[str, Any]:
    """Step optimizer and scheduler in training_step."""
    net = Manual(steps=6)
    trainer(max_steps=6, val_check_interval=3).fit(net, data(12), data(2, seed=1))
    return {
        "losses": net.losses,
        "windows": [record.losses[rank] for record in net.scheduler.history],
        "parameters": flat(net),
        "validated": net.validated,
        "trained": net.trained,
    }


def probes(rank: int, folder: Path) -> dict[str, Any]:
    """Compare replicas on a batch of the validation loader, of the training loader, or by a function."""
    x, y = (part[:16:2] for part in data(2, seed=1).dataset.tensors)  # those of the first rank
    choices = {"eval": "eval", "train": "train", "function": lambda module: module.loss([x, y])}
    found = {}
    for name, choice in choices.items():
        net = Net(steps=16, auto_lr=True, pct_start=0.7)
        keep = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
        trainer(keep, hdet=HDET(probe=choice), max_epochs=4).fit(net, data(4), data(2, seed=1))
        found[name] = {
            "probes": [record.probes for record in net.scheduler.history],
            "errors": net.errors,
            "parameters": flat(net),
        }
        if name == "train":
            again = Net(steps=16, auto_lr=True, pct_start=0.7)
            fit, path = trainer(hdet=HDET(probe=choice), max_epochs=4), folder / name / "epoch=1.ckpt"
            fit.fit(again, data(4), data(2, seed=1), ckpt_path=path)
            found[name]["resumed"] = flat(again)
    found["messages"] = {}
    for name, (choice, options) in {"no loader": ("eval", {"limit_val_batches": 0}), "no loss": ("eval", {})}.items():
        net = Net(steps=16, auto_lr=True)
        if name == "no loss":
            net.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
        try:
            trainer(hdet=HDET(probe=choice), max_epochs=4, **options).fit(net, data(4), data(2, seed=1))
        except ValueError as error:
            found["messages"][name] = str(error)
    return found


def one_replica(rank: int, folder: Path) -> dict[str, Any]:
    """Train on one device, in a group of one process."""
    own, _ = dist.new_subgroups(1)
    net = Net(steps=6, ensemble=hk.ProcessEnsemble(own))
    rates = Rates()
    trainer(rates, strategy="auto", devices=1, max_steps=6).fit(net, data(12), data(2, seed=1))
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.01)
    plain = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 6)
    expected = []
    for _ in range(6):
        expected.append(plain.get_last_lr()[0])
        optimizer.step()
        plain.step()
    return {"rates": rates.found, "expected": expected, "replicas": net.scheduler.cycle.ensemble.size}


class Rates(pl.Callback):
    """Notes the learning rate of every batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found.append(trainer.optimizers[0].param_groups[0]["lr"])


def scouting(rank: int, folder: Path) -> dict[str, Any]:
    """Train without a learning rate, to the end and only into the search for one."""
    settings = hk.ScoutSettings(share=2 / 3, apart=1.0, fewest=4, lowest=1e-5, highest=1.0)  # 20 of 50 steps
    found = {}
    for name, steps in (("whole", 50), ("short", 7)):
        net = Net(steps=50, max_lr=None, auto_lr=True, scout=settings)
        start = flat(net)
        keep = ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        trainer(keep, max_steps=steps, val_check_interval=7).fit(net, data(50), data(2, seed=1))
        found[name] = {
            "start": start,
            "validated": net.validated,
            "saved": {step: saved(folder / name / f"step={step}.ckpt") for step in range(5, steps + 1, 5)},
            "found": net.scheduler.scouted,
            "parameters": flat(net),
        }
    return found


class Stacked(pl.LightningModule):
    """Four replicas on one device, with manual optimization."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
        self.group = group
        self.losses: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        self.stack = hk.ReplicaStack(self.net, 4, ensemble=hk.ProcessEnsemble(self.group))
        optimizer = hk.FusedAdamW(self.stack.parameters(), lr=0.01)
        self.scheduler = hk.HDETOneCycleLR(optimizer, 0.02, 30, sync_every=T, ensemble=self.stack.ensemble)
        return [optimizer], [self.scheduler]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        losses = self.stack.backward(self.loss, *batch)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step(losses)
        self.losses.append(losses.tolist())

    @staticmethod
    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x), y)

    def rows(self) -> Tensor:
        return torch.cat([param.detach().flatten(1) for param in self.stack.parameters()], dim=1)


def stack(rank: int, folder: Path) -> dict[str, Any]:
    """Train a stack on one device, by Lightning and in a loop, to the middle of a cycle."""
    own, _ = dist.new_subgroups(1)
    net, loop = Stacked(own), Stacked(own)
    trainer(strategy="auto", devices=1, max_steps=10).fit(net, data(30))
    (optimizer,), (scheduler,) = loop.configure_optimizers()
    for _, (x, y) in zip(range(10), data(30), strict=False):
        losses = loop.stack.backward(loop.loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        loop.losses.append(losses.tolist())
    scheduler.converge()
    return {
        "replicas": net.scheduler.cycle.ensemble.size,
        "losses": net.losses,
        "expected": loop.losses,
        "rows": net.rows(),
        "average": loop.rows(),
    }
