"""The survey of a model's tensors: found once, and again as soon as a tensor or its layout is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge import payload as module
from hdet_kernels.converge.payload import ModelTensors
from hdet_kernels.converge.survey import take_survey
from hdet_kernels.ensemble import SingleReplica


def test_every_memory_is_in_one_kind() -> None:
    weight, mask, tracked = nn.Parameter(torch.ones(2)), torch.full((3,), torch.inf), torch.tensor(7)
    view, mean = weight.detach().view(2), torch.ones(5)
    kinds = {"parameter": [weight, nn.Parameter(torch.ones(0))], "master": [], "buffer": [view, mask, tracked, mean]}
    found = take_survey(kinds, [mask], lambda: [("layer.weight", weight)])
    assert [found.params, found.masks, found.integers, found.buffers] == [[weight], [mask], [tracked], [mean]]
    assert found.labels[:3] == ["parameter layer.weight", "parameter 1", "buffer 0"]
    assert found.noted[2] == "buffer 0 tied to parameter layer.weight"
    assert found.excused == {"buffer 1"}
    assert found.distributed == []


class Watched:
    """A small model whose surveys are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, homed: bool) -> None:
        self.surveys = 0
        self.params = [nn.Parameter(torch.full((2, 2), float(number))) for number in range(3)]
        self.buffers: list[Tensor] = [torch.ones(2)]
        self.state: dict[str, Tensor] = {"moment": torch.ones(3)}

        def counted(*args: Any) -> Any:
            self.surveys += 1
            return take_survey(*args)

        monkeypatch.setattr(module, "take_survey", counted)
        params = Buckets(self.params) if homed else self.params
        sources = {"state": lambda: self.state, "buffers": lambda: self.buffers}
        self.tensors = ModelTensors(params, SingleReplica(), counts=None, **sources)  # type: ignore[arg-type]

    def look(self) -> tuple[int, int]:
        """The hashes of the layouts that other processes would compare."""
        payload = self.tensors.payload(include_state=True)
        return payload.survey.layout, payload.state_layout

    def values(self) -> list[float]:
        """One element of every parameter, as it would be averaged."""
        payload = self.tensors.payload(include_state=False)
        flat = torch.cat([tensor.view(-1) for tensor in payload.all_params])
        return [value for value in flat.unique().tolist() if value]


def set_data(watched: Watched, number: int, data: Tensor) -> None:
    watched.params[number].data = data


def tie(watched: Watched) -> None:
    set_data(watched, 1, watched.params[0].data)


#: Changes after a sync, and whether processes must notice when only one of them has it.
CHANGES: dict[str, tuple[Callable[[Watched], object], bool]] = {
    "parameter replaced": (lambda w: set_data(w, 1, torch.full((2, 2), 5.0)), False),
    "parameter transposed": (lambda w: set_data(w, 1, w.params[1].data.t()), True),
    "parameters tied": (tie, True),
    "buffer replaced": (lambda w: w.buffers.__setitem__(0, torch.zeros(2)), False),
    "buffer of another shape": (lambda w: w.buffers.__setitem__(0, torch.zeros(3)), True),
    "buffer added": (lambda w: w.buffers.append(torch.zeros(2)), True),
    "buffer tied": (lambda w: w.buffers.append(w.params[2].detach()), True),
}


def test_nothing_is_found_twice_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for homed in (False, True):
        watched = Watched(monkeypatch, homed=homed)
        first = watched.look()
        for param in watched.params:
            param.data.mul_(2)
        assert watched.look() == first
        assert watched.surveys == 1
        assert watched.values() == [2.0, 4.0]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_in_loose_parameters(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=False)
    before = watched.look()
    make, noticed = CHANGES[change]
    make(watched)
    assert (watched.look() != before) == noticed
    assert watched.surveys == 2
    assert watched.values() == {"parameter replaced": [2.0, 5.0], "parameters tied": [2.0]}.get(change, [1.0, 2.0])


@pytest.mark.parametrize("change", ["parameter replaced", "parameter transposed", "buffer replaced", "buffer added"])
def test_every_change_is_found_in_buckets(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=True)
    before = watched.look()
    make, noticed = CHANGES[change]
    make(watched)
    # Parameters come back to their slots, with their values.
    assert (watched.look() != before) == (noticed and "buffer" in change)
    assert watched.surveys == 2
    assert watched.values() == ([2.0, 5.0] if change == "parameter replaced" else [1.0, 2.0])
    (flat,) = watched.tensors.buckets.flats if watched.tensors.buckets is not None else ()
    inside = [flat.data_ptr() <= param.data_ptr() < flat.data_ptr() + flat.nbytes for param in watched.params]
    assert all(inside)
    assert watched.surveys == 2


def test_a_parameter_of_another_shape_is_refused_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=True)
    watched.look()
    set_data(watched, 1, watched.params[1].data.view(4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 1 was torch\.float32"):
            watched.look()


def test_another_layout_of_the_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=False)
    hashes = [watched.look()[1], watched.look()[1]]
    watched.state["moment"] = torch.ones(3)  # another tensor of the same layout
    hashes.append(watched.look()[1])
    assert len(set(hashes)) == 1
    watched.state["moment"].data = torch.ones(4)
    hashes.append(watched.look()[1])
    watched.state["other"] = watched.state.pop("moment")
    hashes.append(watched.look()[1])
    watched.state.clear()
    hashes.append(watched.look()[1])
    assert len(set(hashes)) == 4
    assert hashes[-1] == 0
