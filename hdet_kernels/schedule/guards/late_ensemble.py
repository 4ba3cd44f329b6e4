"""Who the replicas are, for a scheduler that is built before the process group.

Frameworks and scripts initialise ``torch.distributed`` when training begins, often after the optimizer and its
scheduler were built. Such a scheduler begins as one replica and takes the default process group when it is first used.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from hdet_kernels.ensemble import Ensemble, announced_size
from hdet_kernels.schedule.cycle import Cycle

log = logging.getLogger("hdet_kernels")

_REMEDY = (
    "call torch.distributed.init_process_group() before the first step, or pass "
    "ensemble=hdet_kernels.ensemble.SingleReplica() if every process is to train for itself"
)


class LateEnsemble:
    """The decision between one replica and a process group that is initialised later.

    Args:
        given: ``ensemble=`` of the scheduler.
        found: the replicas that it was built with.

    Attributes:
        open: whether it is still to be decided.
    """

    def __init__(self, given: Ensemble | None, found: Ensemble) -> None:
        self._single = given is None and found.size == 1
        self.open = self._single and not _initialised()

    @property
    def arrived(self) -> bool:
        """Whether the decision is open and there is a process group now."""
        return self.open and _several_processes()

    def check_arrived(self) -> None:
        """Raise RuntimeError if the processes of this run should have a group by now, and have none."""
        if self.open and not _initialised() and (size := announced_size()) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {size} in the environment, but no process group is initialised: each process would "
                f"train one replica for itself; {_REMEDY}"
            )

    def check_none_arrived(self) -> None:
        """Raise RuntimeError if a process group was initialised after the decision for one replica."""
        if self._single and not self.open and _several_processes():
            raise RuntimeError(
                f"a process group of {dist.get_world_size()} processes was initialised after the scheduler was first "
                f"used, as the only replica: {_REMEDY}"
            )


def name_one_replica(cycle: Cycle) -> None:
    """Log, where there is one replica, that nothing is fanned out; a warning where the user asked for a spread."""
    if cycle.ensemble.size > 1:
        return
    controller = cycle.spread.controller
    if controller is not None and controller.reads == "slopes":
        log.info("one replica: nothing is fanned out or averaged, and %s moves the base", type(controller).__name__)
        return
    asked = any(hyper.spread for hyper in cycle.spread.hyperparameters)
    log.log(
        logging.WARNING if asked else logging.INFO,
        "one replica: plain %s, nothing is fanned out or averaged. For several replicas start several processes "
        "(torchrun) and call torch.distributed.init_process_group(), or train a hdet_kernels.ReplicaStack",
        cycle.schedule.removeprefix("HDETScheduler around "),
    )


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _several_processes() -> bool:
    return _initialised() and dist.get_world_size() > 1
