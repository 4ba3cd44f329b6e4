"""Setups of a trainer in which there are no replicas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdet_kernels.integrations.transformers.strategy import check_replicas
from tests.integrations.transformers import tiny


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deepspeed", "zero3.json", "DeepSpeed"),
        ("fsdp", "full_shard", "FSDP"),
        ("_n_gpu", 4, r"4 GPUs \(DataParallel\)"),
        ("parallelism_config", SimpleNamespace(tp_size=2, dp_replicate_size=2), "tp_size=2"),
    ],
)
def test_setups_without_replicas_are_refused(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    args = tiny.arguments(str(tmp_path))
    check_replicas(args)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"whole replica of the model.*{reason}.*torchrun"):
        check_replicas(args)


def test_a_model_that_was_loaded_sharded_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    check_replicas(tiny.arguments(str(tmp_path)), model)
    model.is_distributed_loading_by_transformers = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="loaded sharded"):
        check_replicas(tiny.arguments(str(tmp_path)), model)
