"""Losses of a step as totals and numbers of labels, and the hook that takes them from a model."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.integrations.transformers.losses import LossHook, StepLoss, predicted_labels, shifts_labels
from tests.integrations.transformers import tiny


def test_a_step_is_the_mean_over_all_items() -> None:
    losses = StepLoss()
    assert losses.take() is None
    losses.add(torch.tensor(6.0), torch.tensor(2))
    losses.add(torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(6))
    assert losses.take() == torch.tensor(1.0)
    losses.add(torch.tensor(1.0))
    losses.add(torch.tensor(2.0))
    assert losses.take() == torch.tensor(1.5)
    losses.add(torch.tensor(0.0), torch.tensor(0))
    assert losses.take() == torch.tensor(0.0)
    assert losses.take() is None


def test_labels_that_enter_the_loss_are_counted() -> None:
    labels = torch.tensor([[1, 2, -100, -100], [1, 2, 3, -100]])
    assert predicted_labels({"labels": labels}, shifted=False) == 5
    assert predicted_labels({"labels": labels}, shifted=True) == 3
    assert predicted_labels({"labels": labels, "shift_labels": labels[:1]}, shifted=True) == 2
    assert predicted_labels({"labels": [{"boxes": 1}]}, shifted=False) is None
    assert predicted_labels({}, shifted=True) is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("normalised", [False, True], ids=["mean", "items of all"])
def test_the_hook_takes_the_mean_of_a_model_in_training(kind: str, normalised: bool) -> None:
    model = tiny.model(kind).train()
    assert shifts_labels(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    losses = StepLoss()
    hook = LossHook(model, losses)
    batches = [torch.utils.data.default_collate(tiny.rows(3, seed=seed)) for seed in (3, 4)]
    batches[1]["labels"][:, 4:] = -100
    means, counts = [], []
    for batch in batches:
        with torch.no_grad():
            means.append(float(model(**batch).loss))
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))
        model(**batch, **({"num_items_in_batch": torch.tensor(1000)} if normalised else {}))
        model.eval()(**batch)
        model.train()
    weights = counts if normalised else [1, 1]
    expected = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)
    assert float(losses.take() or 0.0) == pytest.approx(expected, rel=1e-5)
    hook.remove()
    model(**batches[0])
    assert losses.take() is None


def test_a_model_without_a_loss_says_what_to_use() -> None:
    model = tiny.model().train()
    LossHook(model, StepLoss())
    with pytest.raises(RuntimeError, match=r"GPT2LMHeadModel returned no loss.*HDETTrainer"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
