"""Labels of tensors: names without wrappers, several names of tied tensors, and ties by memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels.converge.labels import all_names, labels_of, plain_name, with_ties


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("0.weight", "0.weight"),
        ("module.0.weight", "0.weight"),
        ("module._orig_mod.block._checkpoint_wrapped_module.weight", "block.weight"),
        ("_orig_mod.module.weight", "weight"),
        ("module", "module"),
        ("head.module.weight", "head.module.weight"),
    ],
)
def test_what_wrappers_add_to_a_name_is_removed(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_a_label_has_all_names_or_else_the_number() -> None:
    first, second, third = torch.ones(1), torch.ones(1), torch.ones(1)
    names = [("a", first), ("b", third), ("module.a", first), ("c", first)]
    labels = labels_of({"parameter": [first, second], "buffer": [third]}, names)
    assert labels == ["parameter a = c", "parameter 1", "buffer b"]


def test_tensors_over_the_same_memory_are_noted() -> None:
    whole, empty = torch.ones(4), torch.ones(0)
    assert with_ties(["a", "b", "c", "d"], [whole, whole.view(2, 2), empty, empty]) == ["a", "b tied to a", "c", "d"]
    assert with_ties(["a", "b"], [whole, torch.ones(4)]) == ["a", "b"]


def test_every_name_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False))
    module[2].weight = module[0].weight
    assert [name for name, _ in all_names(module)] == [
        "0.weight", "2.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip
