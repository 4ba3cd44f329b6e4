"""Groups that FusedMuon gets from a ZeroRedundancyOptimizer, which expects as many groups as it gave."""

from __future__ import annotations

import sys
from typing import Any

#: What Muon and AdamW have numbers of their own for.
_OF_EACH = ("lr", "weight_decay", "eps")


def check_groups_of_zero() -> None:
    """Raise ValueError if a ZeroRedundancyOptimizer calls, with groups that do not say what trains them.

    It gives every process some of the parameters of each group, and its own defaults as entries of all groups. So the
    groups may hold matrices on one process and other parameters on the next, and AdamW's would have the numbers of
    Muon. What is checked here is the same on all processes, and none of them waits for another that raised.
    """
    zero = _calling_zero()
    if zero is None:
        return
    for number, group in enumerate(zero.param_groups):
        if "use_muon" not in group and any(param.dim() != 2 for param in group["params"]):
            raise ValueError(
                f"ZeroRedundancyOptimizer keeps the groups that it is given, and FusedMuon would divide group {number},"
                " which has no use_muon: give it two groups, {'params': matrices, 'use_muon': True} and {'params': "
                "others, 'use_muon': False}"
            )
        given = [name for name in _OF_EACH if name in zero.defaults]
        if given and not group.get("use_muon", True):
            raise ValueError(
                f"ZeroRedundancyOptimizer passes {given[0]}={zero.defaults[given[0]]!r} on to all groups, and group "
                f"{number}, which AdamW trains, would have that of Muon: leave {given[0]} out there, and give every "
                "group its own"
            )


def _calling_zero() -> Any:
    """Return the ZeroRedundancyOptimizer in one of whose methods this is called; None if there is none."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None:  # not imported, so that nothing can be one
        return None
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if isinstance(found := frame.f_locals.get("self"), module.ZeroRedundancyOptimizer):
            return found
    return None
