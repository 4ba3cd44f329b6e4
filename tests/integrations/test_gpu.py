"""Mixed precision with clipped gradients on a GPU, in every framework, by our optimizers: as by torch's.

One process is one replica: what is compared is the step, with the framework's own scaler and clipping around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hdet_kernels as hk

pytestmark = [pytest.mark.gpu, pytest.mark.full]

STEPS = 12
Optimizer = Callable[..., torch.optim.Optimizer]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def _data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * STEPS, 8, generator=made)
    return TensorDataset(inputs, 30 * inputs.sum(dim=1, keepdim=True))  # gradients that are clipped


def _scheduler(optimizer: torch.optim.Optimizer) -> hk.HDETOneCycleLR:
    return hk.HDETOneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)


def _lightning(optimizer: Optimizer, precision: str, folder: Path) -> nn.Module:
    pl = pytest.importorskip("lightning.pytorch")
    from hdet_kernels.integrations.lightning import HDET

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert all(param.is_cuda for param in self.parameters())  # Lightning moves them to the CPU at the end
            return F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> dict[str, Any]:
            made = optimizer(self.parameters(), lr=1e-2)
            return {"optimizer": made, "lr_scheduler": {"scheduler": _scheduler(made), "interval": "step"}}

    module = Module()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        callbacks=[HDET()],
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision=f"{precision}-mixed",
        gradient_clip_val=1.0,
        default_root_dir=folder,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(module, DataLoader(_data(), batch_size=4))
    return module.model


def _accelerate(optimizer: Optimizer, precision: str, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    from hdet_kernels.integrations.accelerate import prepare

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="fp16" if precision == "16" else precision)
    model = _model()
    made = optimizer(model.parameters(), lr=1e-2)
    loader = DataLoader(_data(), batch_size=4)
    model, made, loader, scheduler = prepare(accelerator, model, made, loader, _scheduler(made))
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        scheduler.step(loss)
        made.zero_grad()
    return accelerator.unwrap_model(model)


def _transformers(optimizer: Optimizer, precision: str, folder: Path) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from hdet_kernels.integrations.transformers import HDETCallback

    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            found = self.model(inputs)
            return {"loss": F.mse_loss(found, labels), "logits": found}

    predictor = Predictor().cuda()
    made = optimizer(predictor.parameters(), lr=1e-2)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"fp16" if precision == "16" else precision: True},
    )
    rows = [{"inputs": inputs, "labels": target} for inputs, target in _data()]
    trainer = transformers.Trainer(
        predictor, arguments, train_dataset=rows, callbacks=[HDETCallback()], optimizers=(made, _scheduler(made))
    )
    trainer.train()
    return predictor.model


@pytest.mark.parametrize("precision", ["16", "bf16"])
@pytest.mark.parametrize("framework", [_lightning, _accelerate, _transformers], ids=["lightning", "accelerate", "hf"])
def test_mixed_precision_with_clipping_is_as_with_torch(framework: Any, precision: str, tmp_path: Path) -> None:
    ours = framework(hk.FusedAdamW, precision, tmp_path / "ours")
    # Lightning does not clip the gradients of torch's fused optimizers.
    fused = framework is not _lightning
    torchs = framework(partial(torch.optim.AdamW, fused=fused), precision, tmp_path / "torch")
    begun = list(_model().parameters())
    for mine, other, first in zip(ours.parameters(), torchs.parameters(), begun, strict=True):
        assert mine.is_cuda or framework is _lightning
        assert not torch.equal(mine.cpu(), first)
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)
