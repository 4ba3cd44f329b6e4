"""The schedulers that a training loop steps, and the cycle of HDET that they drive."""

from hdet_kernels.schedule.schedulers import HDETOneCycleLR, HDETScheduler

__all__ = ["HDETOneCycleLR", "HDETScheduler"]
