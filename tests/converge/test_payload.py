"""The payload: which tensors of a model are averaged, and how they are named, flattened, copied and written back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge import payload as module
from hdet_kernels.converge.payload import ModelTensors, Payload, all_names, plain_name, take_inventory
from hdet_kernels.converge.plan import AverageRequest, Plan, decide
from hdet_kernels.converge.split_masters import SplitRegion
from hdet_kernels.converge.summary import Checksum
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.agreements import agreement


class Counts:
    """Step counts that are kept here."""

    def __init__(self, *counts: float) -> None:
        self.values = torch.tensor(counts)

    def read(self) -> Tensor:
        return self.values.clone()

    def write(self, counts: Tensor) -> None:
        self.values = counts.clone()


def tensors_of(params: Any, rows: int = 1, **sources: Any) -> ModelTensors:
    ensemble = SingleReplica() if rows == 1 else RowEnsemble(rows)
    usual: dict[str, Any] = {"state": dict, "counts": None, "buffers": tuple}
    return ModelTensors(params, ensemble, **{**usual, **sources})


def planned(compresses: bool = False, **changes: Any) -> Plan:
    request = {name: changes.pop(name) for name in ("skip_if_equal", "average_state") if name in changes}
    return decide(agreement(**changes), AverageRequest(**request), merge="mean", compresses=compresses)


def addresses(regions: list[list[Tensor]]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in region] for region in regions]


# What is averaged


def test_every_kind_of_tensor_has_its_place() -> None:
    weight, quantised = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, dtype=torch.uint8), False)
    moment, mean, tracked = torch.ones(2, 3), torch.ones(4), torch.tensor(7)
    mask = torch.tensor([0.0, -torch.inf])
    tensors = tensors_of(
        [weight, weight, quantised],
        state=lambda: {"exp_avg": moment},
        counts=Counts(3.0),
        buffers=lambda: [mean, tracked, mask, torch.empty(0)],
    )
    assert list(tensors.masks) == [2]
    payload = tensors.payload(include_state=True)
    assert addresses(payload.params) == [[weight.data_ptr()]], "integers have no mean, and tied parameters are one"
    assert payload.params[0][0].shape == (6,)
    assert addresses([payload.buffers, payload.integers]) == [[mean.data_ptr()], [tracked.data_ptr()]]
    assert addresses([payload.masks, payload.all_buffers]) == [[mask.data_ptr()], [mean.data_ptr(), mask.data_ptr()]]
    assert list(payload.state) == ["exp_avg"]
    assert payload.state["exp_avg"].data_ptr() == moment.data_ptr()
    assert payload.counts is not None
    assert payload.counts.tolist() == [3.0]
    sizes = [tensor.numel() for tensor in payload.inventory.tensors]
    assert sizes == [6, 4, 1, 2, 0], "masks are part of the layout"
    assert not payload.inventory.in_buckets
    bare = tensors.payload(include_state=False)
    assert (bare.state, bare.counts) == ({}, None)


def test_a_buffer_that_was_not_finite_is_averaged_once_it_has_changed() -> None:
    least, unknown = torch.full((2,), torch.inf), torch.tensor([torch.nan])
    tensors = tensors_of([torch.ones(1)], buffers=lambda: [least, unknown])
    assert list(tensors.masks) == [0, 1]
    assert not tensors.payload(include_state=False).masks_changed
    least[1] = 3.0
    assert tensors.payload(include_state=False).masks_changed


def test_the_layout_has_names_and_ties() -> None:
    def layout(names: Any, tie: bool = False) -> int:
        first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        if tie:
            second.data = first.data
        tensors = tensors_of([first, second], names=lambda: zip(names, [first, second], strict=False))
        return tensors.payload(include_state=False).inventory.layout

    assert layout("ab") == layout("ab") == layout(["module.a", "_orig_mod.b"])
    assert len({layout("ab"), layout("ba"), layout(""), layout("ab", tie=True), layout("", tie=True)}) == 5


def test_sources_are_read_at_every_sync() -> None:
    state: dict[str, Tensor] = {}
    tensors = tensors_of([torch.ones(1)], state=lambda: state)
    state["late"] = torch.ones(2)
    assert list(tensors.payload(include_state=True).state) == ["late"]


def test_parameters_in_buckets_are_regions_of_their_own_and_averaged_in_their_masters() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    buckets = Buckets(params)
    buckets.keep_masters(lambda dtype: dtype == torch.bfloat16)
    tensors = tensors_of(buckets)
    payload = tensors.payload(include_state=False)
    assert payload.inventory.in_buckets
    assert addresses(payload.params) == [[full.data_ptr()] for full in buckets.full]
    assert {tensor.dtype for tensor in payload.outlines} == {torch.float32}
    for tensor in payload.outlines:
        tensor.fill_(1 + 2.0**-12)
    tensors.write_back(payload, counts=False)
    assert params[1].tolist() == [1.0, 1.0], "the parameter is its master's rounding"
    assert params[0].tolist() == [1 + 2.0**-12] * 3


def test_split_masters_are_regions_in_the_order_of_the_buckets() -> None:
    half, plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(200))
    wide, empty = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(0, dtype=torch.float16))
    buckets = Buckets([empty, half, plain, wide])
    buckets.keep_masters(lambda dtype: dtype == torch.bfloat16, split=True)
    payload = tensors_of(buckets).payload(include_state=False)
    assert [isinstance(region, SplitRegion) for region in payload.params] == [True, False, False]
    copied = payload.copy()
    assert [tensor.shape for tensor in copied.outlines] == [tensor.shape for tensor in payload.outlines]
    assert copied.outlines[0].dtype == torch.float32, "joined"
    sizes = [
        [bucket.numel for _, bucket in Transport(SingleReplica(), 64, None).cut(each.compressible)]
        for each in (payload, copied)
    ]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) < sum(map(Tensor.numel, payload.outlines)), "without float64"


def test_tensors_with_gaps_are_averaged_in_a_copy_that_is_written_back() -> None:
    whole = torch.arange(12.0).view(3, 4)
    spectrum = torch.zeros(4, dtype=torch.complex64)
    tensors = tensors_of([whole[:, :2], spectrum[::2]])
    payload = tensors.payload(include_state=False)
    columns, complex_ = payload.outlines
    assert columns.tolist() == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]
    assert complex_.shape == (4,), "pairs of reals"
    columns.zero_()
    complex_.fill_(1.0)
    assert whole[0, 0] == 0.0
    assert whole[1, 0] == 4.0, "a copy"
    tensors.write_back(payload, counts=False)
    assert whole.tolist() == [[0, 0, 2, 3], [0, 0, 6, 7], [0, 0, 10, 11]]
    assert spectrum.tolist() == [1 + 1j, 0, 1 + 1j, 0]


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "with gaps"])
def test_rows_stay_apart(transposed: bool) -> None:
    tensor = torch.arange(12.0).view(2, 2, 3)
    tensor = tensor.transpose(1, 2) if transposed else tensor
    tensors = tensors_of([tensor], rows=2)
    payload = tensors.payload(include_state=False)
    assert payload.outlines[0].shape == (2, 6)
    payload.outlines[0][1] = 0.0
    tensors.write_back(payload, counts=False)
    assert tensor[0].sum() == 15.0
    assert tensor[1].sum() == 0.0


# What travels in full


def test_regions_follow_the_plan() -> None:
    single, double = torch.ones(2), torch.ones(3, dtype=torch.float64)
    buffer, moment = torch.ones(4), torch.ones(5)
    tensors = tensors_of([single, double], state=lambda: {"m": moment}, buffers=lambda: [buffer])
    payload = tensors.payload(include_state=True)

    def sizes(plan: Plan) -> list[list[int]]:
        return [[tensor.numel() for tensor in region] for region in payload.regions_in_full(plan)]

    assert sizes(planned()) == [[2, 3, 4, 5]]
    assert sizes(planned(average_state=False)) == [[2, 3, 4]]
    assert sizes(planned(compresses=True)) == [[3, 4, 5]], "doubles are not compressed"
    assert sizes(planned(shared=True, equal=True, skip_if_equal=True)) == [[4]]
    assert [[tensor.numel() for tensor in region] for region in payload.compressible] == [[2]]
    homed = tensors_of(Buckets([nn.Parameter(torch.ones(6))]), buffers=lambda: [buffer]).payload(include_state=False)
    assert [len(region) for region in homed.regions_in_full(planned())] == [1, 1], "alone, to be averaged in place"


# Copies, and back


def full_payload() -> tuple[Payload, dict[str, Tensor]]:
    own = {"param": torch.ones(2), "buffer": torch.ones(3), "state": torch.ones(4), "integer": torch.tensor([5])}
    tensors = tensors_of(
        [own["param"]],
        state=lambda: {"m": own["state"]},
        counts=Counts(1.0),
        buffers=lambda: [own["buffer"], own["integer"]],
    )
    return tensors.payload(include_state=True), own


def test_a_copy_has_memory_of_its_own() -> None:
    payload, own = full_payload()
    copied = payload.copy()
    for tensor in (*copied.outlines, *copied.buffers, *copied.state.values(), *copied.integers, copied.counts):
        assert tensor is not None
        tensor.zero_()
    assert all(tensor.all() for tensor in own.values())
    assert payload.counts is not None
    assert payload.counts.tolist() == [1.0]
    assert copied.gapped == []


def test_counts_are_written_on_request() -> None:
    counts = Counts(1.0, 2.0)
    tensors = tensors_of([torch.ones(1)], counts=counts)
    payload = tensors.payload(include_state=True)
    assert payload.counts is not None
    payload.counts.fill_(9.0)
    tensors.write_back(payload, counts=False)
    assert counts.values.tolist() == [1.0, 2.0]
    tensors.write_back(payload, counts=True)
    assert counts.values.tolist() == [9.0, 9.0]


# The summary


def test_the_summary_tells_what_differs() -> None:
    checksum = Checksum(1, None)

    def summary(payload: Payload) -> Any:
        return payload.summary(checksum, consensus=1.0, outer=2.0, bucket_bytes=64)

    payload, own = full_payload()
    before = summary(payload)
    assert (before.consensus, before.outer) == (1.0, 2.0)
    assert before.describe("layout")["tensor 0"] == "parameter 0: float32 (2,) with strides (1,)"
    fields = {"param": "checksum", "buffer": "rest", "state": "rest", "integer": "integers"}
    for name, field in fields.items():
        own[name].mul_(3)
        after = summary(payload)
        changed = [each for each in ("checksum", "rest", "integers") if getattr(after, each) != getattr(before, each)]
        assert changed == [field], name
        own[name].floor_divide_(3) if name == "integer" else own[name].div_(3)
    assert payload.counts is not None
    payload.counts.add_(1)
    assert summary(payload).counts != before.counts
    bare = summary(tensors_of([own["param"]]).payload(include_state=False))
    assert (bare.state, bare.counts) == (0, 0)
    assert bare.layout != before.layout


# The inventory: found once, and again as soon as a tensor or its layout is another one


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


def test_every_name_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False))
    module[2].weight = module[0].weight
    assert [name for name, _ in all_names(module)] == [
        "0.weight", "2.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip


def test_every_memory_is_in_one_kind() -> None:
    weight, mask, tracked = nn.Parameter(torch.ones(2)), torch.full((3,), torch.inf), torch.tensor(7)
    view, mean = weight.detach().view(2), torch.ones(5)
    kinds = {"parameter": [weight, nn.Parameter(torch.ones(0))], "master": [], "buffer": [view, mask, tracked, mean]}
    found = take_inventory(kinds, [mask], lambda: [("layer.weight", weight)])
    assert [found.params, found.masks, found.integers, found.buffers] == [[weight], [mask], [tracked], [mean]]
    assert found.labels[:3] == ["parameter layer.weight", "parameter 1", "buffer 0"]
    assert found.noted[2] == "buffer 0 tied to parameter layer.weight"
    assert found.excused == {"buffer 1"}


class Watched:
    """A small model whose inventories are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, homed: bool) -> None:
        self.taken = 0
        self.params = [nn.Parameter(torch.full((2, 2), float(number))) for number in range(3)]
        self.buffers: list[Tensor] = [torch.ones(2)]
        self.state: dict[str, Tensor] = {"moment": torch.ones(3)}

        def counted(*args: Any) -> Any:
            self.taken += 1
            return take_inventory(*args)

        monkeypatch.setattr(module, "take_inventory", counted)
        params = Buckets(self.params) if homed else self.params
        sources = {"state": lambda: self.state, "buffers": lambda: self.buffers}
        self.tensors = ModelTensors(params, SingleReplica(), counts=None, **sources)  # type: ignore[arg-type]

    def layouts(self) -> tuple[int, int]:
        """The hashes of the layouts that other processes would compare."""
        payload = self.tensors.payload(include_state=True)
        summary = payload.summary(Checksum(1, None), consensus=0.0, outer=0.0, bucket_bytes=64)
        return payload.inventory.layout, summary.state

    def values(self) -> list[float]:
        """One element of every parameter, as it would be averaged."""
        payload = self.tensors.payload(include_state=False)
        flat = torch.cat([tensor.view(-1) for tensor in payload.outlines])
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
        first = watched.layouts()
        for param in watched.params:
            param.data.mul_(2)
        assert watched.layouts() == first
        assert watched.taken == 1
        assert watched.values() == [2.0, 4.0]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_in_loose_parameters(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=False)
    before = watched.layouts()
    make, noticed = CHANGES[change]
    make(watched)
    assert (watched.layouts() != before) == noticed
    assert watched.taken == 2
    assert watched.values() == {"parameter replaced": [2.0, 5.0], "parameters tied": [2.0]}.get(change, [1.0, 2.0])


@pytest.mark.parametrize("change", ["parameter replaced", "parameter transposed", "buffer replaced", "buffer added"])
def test_every_change_is_found_in_buckets(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=True)
    before = watched.layouts()
    make, noticed = CHANGES[change]
    make(watched)
    # Parameters come back to their slots, with their values.
    assert (watched.layouts() != before) == (noticed and "buffer" in change)
    assert watched.taken == 2
    assert watched.values() == ([2.0, 5.0] if change == "parameter replaced" else [1.0, 2.0])
    (flat,) = watched.tensors.buckets.flats if watched.tensors.buckets is not None else ()
    inside = [flat.data_ptr() <= param.data_ptr() < flat.data_ptr() + flat.nbytes for param in watched.params]
    assert all(inside)
    assert watched.taken == 2


def test_a_parameter_of_another_shape_is_refused_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=True)
    watched.layouts()
    set_data(watched, 1, watched.params[1].data.view(4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 1 was torch\.float32"):
            watched.layouts()


def test_another_layout_of_the_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, homed=False)
    hashes = [watched.layouts()[1], watched.layouts()[1]]
    watched.state["moment"] = torch.ones(3)  # another tensor of the same layout
    hashes.append(watched.layouts()[1])
    assert len(set(hashes)) == 1
    watched.state["moment"].data = torch.ones(4)
    hashes.append(watched.layouts()[1])
    watched.state["other"] = watched.state.pop("moment")
    hashes.append(watched.layouts()[1])
    watched.state.clear()
    hashes.append(watched.layouts()[1])
    assert len(set(hashes)) == 4
    assert hashes[-1] == 0


# What is refused


@pytest.mark.parametrize(
    ("params", "rows", "error", "message"),
    [
        ([], 1, ValueError, "there are no parameters to average: the optimizer's parameter groups are empty"),
        ([torch.ones(3).to_sparse()], 1, TypeError, r"of shape \(3,\) has layout torch.sparse_coo; only dense tensors"),
        ([torch.ones(2).to(torch.float8_e4m3fn)], 1, TypeError, "a float8_e4m3fn tensor .* cannot be averaged"),
        ([torch.ones(1).expand(3)], 1, ValueError, "has gaps or overlaps in memory and cannot be averaged in place"),
        ([torch.ones(5).as_strided((3, 3), (1, 1))], 1, ValueError, "has gaps or overlaps in memory"),
        ([torch.ones(4, 2)], 3, ValueError, r"3 replicas are the rows of tensors \[3, …\], got shape \(4, 2\)"),
        ([torch.ones(())], 3, ValueError, r"3 replicas are the rows of tensors \[3, …\], got shape \(\)"),
    ],
    ids=["none", "sparse", "8 bits", "expanded", "overlapping", "other rows", "no rows"],
)  # fmt: skip
def test_tensors_that_cannot_be_averaged(params: list[Tensor], rows: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tensors_of(params, rows=rows)


def test_memory_that_is_shared_in_part_is_refused() -> None:
    whole = torch.zeros(8)
    with pytest.raises(ValueError, match=r"of shapes \(8,\) and \(4,\), share a part of their memory"):
        tensors_of([nn.Parameter(whole), nn.Parameter(whole[2:6])])


def test_a_device_without_a_backend_is_refused() -> None:
    class GpuOnly(SingleReplica):
        talks = True

        def serves(self, device: torch.device) -> bool:
            return device.type == "cuda"

    with pytest.raises(ValueError, match=r"is on cpu, for which SingleReplica\(\) has no backend: move the tensor, or"):
        ModelTensors([torch.ones(2)], GpuOnly(), dict, None, tuple)
