"""An average as planned: what a plan leaves out stays each replica's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet_kernels.converge.averaging import handshake_cost
from hdet_kernels.converge.transport import Cost
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases
from tests.training import Trainer

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


def _skipping(rank: int, kind: str, average_state: Any) -> list[set[float]]:
    """Rank 1 does not step its optimizer in the third step, as where GradScaler finds an infinity."""
    trainer = Trainer(
        rank, ddp=False, auto_lr=False, make_optimizer=OPTIMIZERS[kind], average_state=average_state, gradients="local"
    )
    seen = []
    for step in range(1, 6):
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        if not (rank == 1 and step == 3):
            trainer.optimizer.step()
        trainer.scheduler.step(1.0)
        seen.append({float(state["step"]) for state in trainer.optimizer.state.values()})
    return seen


SKIPPING = Cases(3, _skipping, [(kind, average_state) for kind in OPTIMIZERS for average_state in ("auto", False)])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_counts_become_the_largest_with_the_state(kind: str) -> None:
    whole, skipped, _ = SKIPPING[kind, "auto"]
    assert whole == [{1.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    assert skipped == [{1.0}, {2.0}, {2.0}, {4.0}, {5.0}], "the sync is after step 4"
    whole, skipped, _ = SKIPPING[kind, False]
    assert whole == [{1.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    assert skipped == [{1.0}, {2.0}, {2.0}, {3.0}, {4.0}], "without the state they stay its own"


@pytest.mark.parametrize("ensemble", [SingleReplica(), RowEnsemble(2)], ids=["single", "rows"])
def test_replicas_of_one_process_have_no_handshake_to_pay(ensemble: Any) -> None:
    assert handshake_cost(ensemble) == Cost(0, 0)
