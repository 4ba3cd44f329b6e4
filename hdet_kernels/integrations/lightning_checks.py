"""The checks of a Lightning run before it begins: strategy, interval of the scheduler, optimizer.

Lightning's classes are told by their names: there are two packages of them, ``lightning.pytorch`` and
``pytorch_lightning``.
"""

from __future__ import annotations

from typing import Any

from hdet_kernels.schedule.with_cycle import WithCycle

#: Strategies whose processes do not hold one whole replica each, and the reason.
_REFUSED = {
    "FSDPStrategy": "shards one replica over the processes",
    "ModelParallelStrategy": "shards one replica over the processes",
    "DeepSpeedStrategy": "keeps parameters and optimizer state of its own",
    "XLAStrategy": "compiles whole steps, in which HDET cannot average the replicas",
    "SingleDeviceXLAStrategy": "compiles whole steps, in which HDET cannot average the replicas",
}
_ACCEPTED = ("DDPStrategy", "SingleDeviceStrategy")

#: Optimizers that make the parameters of all processes equal again.
_EQUALISERS = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")

_RETURN = '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}'


def checked_schedulers(configs: list[Any], *, automatic: bool) -> list[WithCycle]:
    """Return the HDET schedulers of a run.

    Args:
        configs: the trainer's ``lr_scheduler_configs``.
        automatic: whether Lightning steps them; with manual optimization the user does.

    Raises:
        ValueError: there is none, or one is not stepped after every step of the optimizer.
    """
    found = [config for config in configs if isinstance(config.scheduler, WithCycle)]
    if not found:
        names = ", ".join(type(config.scheduler).__name__ for config in configs) or "none"
        raise ValueError(
            f"HDET() found no HDET scheduler; configure_optimizers returned: {names}. Return hk.HDETOneCycleLR or "
            f"hk.HDETScheduler, as in {_RETURN}"
        )
    for config in found:
        if automatic and (config.interval, config.frequency) != ("step", 1):
            raise ValueError(
                f"{type(config.scheduler).__name__} must be stepped after every step of the optimizer, got "
                f"interval={config.interval!r} (Lightning's default is 'epoch') and frequency={config.frequency}: "
                f"return {_RETURN} from configure_optimizers"
            )
    return [config.scheduler for config in found]


def check_strategy(strategy: object) -> None:
    """Raise ValueError unless every process of a strategy holds one whole replica that may differ from the others."""
    name, kinds = type(strategy).__name__, [kind.__name__ for kind in type(strategy).__mro__]
    reason = next((reason for kind, reason in _REFUSED.items() if kind in kinds), None)
    if reason is None and not set(_ACCEPTED).intersection(kinds):
        reason = "is not known to give every process one whole replica"
    if reason is not None:
        raise ValueError(
            f"HDET needs one whole replica in every process, whose parameters may differ from the others', but {name} "
            f'{reason}. Pass strategy="ddp" (or a subclass of DDPStrategy), train on one device, or train sharded '
            "replicas in a loop of your own with ensemble=hk.ProcessEnsemble(mesh)"
        )
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            f"{name}(model_averaging_period=...) averages the parameters itself, and HDET does too: leave it out"
        )


def check_optimizer(optimizer: object) -> None:
    """Raise ValueError if an optimizer makes the parameters of all processes equal at every step."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _EQUALISERS:
            raise ValueError(
                f"{kind.__name__} makes the parameters of all processes equal, so that replicas could not differ: use "
                "a plain optimizer, such as hk.FusedAdamW"
            )
