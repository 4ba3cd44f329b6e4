"""The class that the paper's authors published, with its arguments and names, and without its defects."""

from __future__ import annotations

import logging
from typing import Literal

from torch.optim import Optimizer

from hdet_kernels.checks import check_flag, check_number, check_positive, check_share, check_whole
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.ensemble import default_ensemble
from hdet_kernels.schedule.schedulers import HDETOneCycleLR

log = logging.getLogger("hdet_kernels")


class OneCycleAutoLR(HDETOneCycleLR):
    """``OneCycleAutoLR`` of the paper's authors: :class:`HDETOneCycleLR` with their controller and argument names.

    Arguments, their order and their defaults are the published ones, and so is ``step(loss)``. It differs where the
    published class does not do what it was meant to do: the spread reaches the optimizer from the first step, replicas
    are averaged also with ``enable_auto_lr=False``, the learning rate decays to OneCycle's floor, every rank draws the
    same permutation, no global generator is reseeded, and the average takes a few collectives.

    ``rank`` and ``world_size`` are those of the process group if one is initialised, whatever is passed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        auto_lr_warmup_steps: int = 100_000,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        rank: int = 0,
        world_size: int = 1,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
    ) -> None:
        if max_lr is None:
            raise TypeError("max_lr must be a learning rate, or a list of one for each group; HDETOneCycleLR finds one")
        check_whole("auto_lr_warmup_steps", auto_lr_warmup_steps, at_least=0)
        spread = check_number("ensemble_lr_spread_ratio", ensemble_lr_spread_ratio, at_least=0, below=1)
        sync_every = check_whole("model_sync_interval", model_sync_interval, at_least=1)
        check_flag("enable_auto_lr", enable_auto_lr)
        check_positive("loss_scale", loss_scale)
        check_positive("lr_of_lr", lr_of_lr)
        check_share("momentum_of_lr", momentum_of_lr, below_one=True)
        _check_place(check_whole("rank", rank, at_least=0), check_whole("world_size", world_size, at_least=1))
        controller = SoftmaxController(auto_lr_warmup_steps, scale=loss_scale, rate=lr_of_lr, beta=momentum_of_lr)
        self.enable_auto_lr = enable_auto_lr
        self.ensemble_lr_spread_ratio, self.model_sync_interval = spread, sync_every
        super().__init__(
            optimizer,
            max_lr,
            total_steps,
            epochs,
            steps_per_epoch,
            pct_start,
            anneal_strategy,
            cycle_momentum,
            base_momentum,
            max_momentum,
            div_factor,
            final_div_factor,
            three_phase,
            last_epoch,
            spread=spread,
            sync_every=sync_every,
            auto_lr=controller if enable_auto_lr else False,
            tie_groups=False,
        )

    @property
    def rank(self) -> int:
        """The number of this replica."""
        return self.cycle.ensemble.replica

    @property
    def world_size(self) -> int:
        """The number of replicas."""
        return self.cycle.ensemble.size


def _check_place(rank: int, world_size: int) -> None:
    """Raise if there is no process group of the given size; warn if it says otherwise."""
    ensemble = default_ensemble()
    if world_size > 1 and ensemble.size == 1:
        raise ValueError(
            f"world_size={world_size}, but there is no process group of that size: call "
            "torch.distributed.init_process_group() before building the scheduler"
        )
    if world_size not in (1, ensemble.size) or (world_size > 1 and rank != ensemble.replica):
        log.warning(
            "rank=%d, world_size=%d were passed; the process group says %d of %d, and that is used",
            *(rank, world_size, ensemble.replica, ensemble.size),
        )
