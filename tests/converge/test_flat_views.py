"""Flat views: of any layout, kept where that is harmless."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.converge.flat_views import FlatViews, Gapped, flattened


def test_views_of_cpu_tensors_are_kept_until_they_are_forgotten() -> None:
    tensors = [nn.Parameter(torch.ones(2, 3)), torch.ones(4)]
    views = FlatViews(1)
    first = views.of(tensors, [])
    assert [view.shape for view in first] == [(6,), (4,)]
    assert not any(view.requires_grad for view in first)
    again = views.of(tensors, [])
    assert [id(view) for view in again] == [id(view) for view in first]
    assert again is not first, "a caller may change its list"
    tensors[1].data = torch.zeros(4)
    views.forget()
    assert views.of(tensors, [])[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["gaps", "complex", "inference mode"])
def test_views_that_may_not_be_reused_are_made_anew(kind: str) -> None:
    tensor = {"gaps": torch.arange(6.0)[::2], "complex": torch.ones(3, dtype=torch.complex64)}.get(kind, torch.ones(3))
    views, copies = FlatViews(1), [Gapped(), Gapped()]
    with torch.inference_mode(kind == "inference mode"):
        first = views.of([tensor], copies[0])
    second = views.of([tensor], copies[1])
    assert first[0] is not second[0]
    assert [len(each) for each in copies] == [kind == "gaps"] * 2
    second[0].mul_(2)  # a view that was made in inference mode could not be written here


def test_rows_are_kept_apart() -> None:
    stacked: Tensor = torch.arange(12.0).view(2, 3, 2)
    assert flattened(stacked, 2, []).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(ValueError, match="3 replicas are the rows of tensors"):
        flattened(stacked, 3, [])
