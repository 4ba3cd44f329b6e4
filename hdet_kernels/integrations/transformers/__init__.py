"""HDET in transformers' ``Trainer``: a callback for your own scheduler, or a trainer that builds the scheduler itself.

``callback.py`` follows the events of a training: it records losses (``losses.py``), holds the averaged model while the
trainer evaluates or saves, and averages the replicas at the end. ``trainer.py`` is a mixin that adds this callback to a
trainer, builds its scheduler from ``TrainingArguments`` (``schedule.py``), and does what no event announces.
``strategy.py`` refuses setups in which there is nothing to average.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdet_kernels.integrations.transformers.callback import HDETCallback
    from hdet_kernels.integrations.transformers.trainer import HDETTrainer, HDETTrainerMixin

__all__ = ["HDETCallback", "HDETTrainer", "HDETTrainerMixin"]

_MODULES = {"HDETCallback": "callback", "HDETTrainer": "trainer", "HDETTrainerMixin": "trainer"}


def __getattr__(name: str) -> Any:
    """Import a class when it is first asked for: a trainer takes seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("transformers", "accelerate"):
        try:
            importlib.import_module(needed)
        except ImportError as error:
            raise ImportError(
                f"{name} needs {needed}, which cannot be imported ({error}): pip install 'hdet_kernels[transformers]'"
            ) from error
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
