"""The payload: which tensors of a model are averaged, and how they are flattened, copied, restored and settled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.buckets import Buckets
from hdet_kernels.converge.payload import ModelTensors, Payload
from hdet_kernels.converge.plan import AverageRequest, Plan, decide
from hdet_kernels.converge.split_region import SplitRegion
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
    assert [tensor.numel() for tensor in payload.tensors] == [6, 4, 1, 2, 0], "masks are part of the layout"
    assert not payload.homed
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
        return tensors.payload(include_state=False).summary(Checksum(1, None), consensus=0.0, outer=0.0).layout

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
    assert payload.homed
    assert addresses(payload.params) == [[full.data_ptr()] for full in buckets.full]
    assert {tensor.dtype for tensor in payload.all_params} == {torch.float32}
    for tensor in payload.all_params:
        tensor.fill_(1 + 2.0**-12)
    tensors.settle(payload, counts=False)
    assert params[1].tolist() == [1.0, 1.0], "the parameter is its master's rounding"
    assert params[0].tolist() == [1 + 2.0**-12] * 3


def test_joined_masters_are_a_copy_which_is_written_when_the_average_is_settled() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buckets = Buckets([param])
    buckets.keep_masters(lambda dtype: dtype == torch.bfloat16, split=True)
    tensors = tensors_of(buckets)
    payload = tensors.payload(include_state=False)
    (full,) = payload.all_params
    full.fill_(2.0)
    assert param.tolist() == [1.0, 1.0, 1.0]
    full.fill_(1 + 2.0**-12)
    tensors.settle(payload, counts=False)
    assert param.tolist() == [1.0, 1.0, 1.0]
    assert (buckets.full[0][:3] == 1 + 2.0**-12).all()


def test_a_copy_may_take_over_joined_masters_and_nothing_else() -> None:
    plain, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buckets = Buckets([plain, half])
    buckets.keep_masters(lambda dtype: dtype == torch.bfloat16, split=True)
    payload = tensors_of(buckets).payload(include_state=False)
    own, taken = payload.copy(), payload.copy(takes_joined=True)
    shared = [mine is theirs for mine, theirs in zip(taken.all_params, payload.all_params, strict=True)]
    assert shared == [tensor.data_ptr() not in (plain.data_ptr(), half.data_ptr()) for tensor in payload.all_params]
    assert sorted(shared) == [False, True]
    assert not set(map(id, own.all_params)) & set(map(id, payload.all_params))
    assert [tensor.tolist() for tensor in own.all_params] == [tensor.tolist() for tensor in taken.all_params]


def test_regions_are_in_the_order_of_the_buckets_whether_masters_are_joined_or_not() -> None:
    half, plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(200))
    wide, empty = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(0, dtype=torch.float16))
    buckets = Buckets([empty, half, plain, wide])
    buckets.keep_masters(lambda dtype: dtype == torch.bfloat16, split=True)
    tensors = tensors_of(buckets)
    joined = tensors.payload(include_state=False)
    apart = tensors.payload(include_state=False, bucket_bytes=64)
    assert [isinstance(region, SplitRegion) for region in apart.regions] == [True, False, False]
    assert [tensor.shape for tensor in apart.outlines] == [tensor.shape for tensor in joined.all_params]
    sizes = [
        [bucket.numel for _, bucket in Transport(SingleReplica(), 64, None).cut(payload.compressible)]
        for payload in (joined, apart)
    ]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) < sum(map(Tensor.numel, apart.outlines)), "without float64"


def test_tensors_with_gaps_are_averaged_in_a_copy_that_is_written_back() -> None:
    whole = torch.arange(12.0).view(3, 4)
    spectrum = torch.zeros(4, dtype=torch.complex64)
    payload = tensors_of([whole[:, :2], spectrum[::2]]).payload(include_state=False)
    columns, complex_ = payload.all_params
    assert columns.tolist() == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]
    assert complex_.shape == (4,), "pairs of reals"
    columns.zero_()
    complex_.fill_(1.0)
    assert whole[0, 0] == 0.0
    assert whole[1, 0] == 4.0, "a copy"
    payload.put_back()
    assert whole.tolist() == [[0, 0, 2, 3], [0, 0, 6, 7], [0, 0, 10, 11]]
    assert spectrum.tolist() == [1 + 1j, 0, 1 + 1j, 0]


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "with gaps"])
def test_rows_stay_apart(transposed: bool) -> None:
    tensor = torch.arange(12.0).view(2, 2, 3)
    tensor = tensor.transpose(1, 2) if transposed else tensor
    payload = tensors_of([tensor], rows=2).payload(include_state=False)
    assert payload.all_params[0].shape == (2, 6)
    payload.all_params[0][1] = 0.0
    payload.put_back()
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
    for tensor in (*copied.all_params, *copied.buffers, *copied.state.values(), *copied.integers, copied.counts):
        assert tensor is not None
        tensor.zero_()
    assert all(tensor.all() for tensor in own.values())
    assert payload.counts is not None
    assert payload.counts.tolist() == [1.0]
    assert copied.gapped == []
    assert addresses([copied.tensors]) == addresses([payload.tensors]), "the layout is that of the model"


@pytest.mark.parametrize("same_integers", [True, False])
def test_a_failure_restores_what_the_plan_changes(same_integers: bool) -> None:
    payload, own = full_payload()

    class Cable(BaseException):
        pass

    def fail() -> None:
        with payload.restore_on_failure(planned(same_integers=same_integers), written_last=False):
            for tensor in own.values():
                tensor.zero_()
            raise Cable

    with pytest.raises(Cable):
        fail()
    assert [bool(own[name].all()) for name in ("param", "buffer", "state")] == [True] * 3
    assert own["integer"].tolist() == [0 if same_integers else 5], "integers that are equal are not touched by a sync"


def test_without_a_failure_nothing_is_restored() -> None:
    payload, own = full_payload()
    with payload.restore_on_failure(planned(), written_last=False):
        own["param"].zero_()
    assert not own["param"].any()


def test_counts_are_written_on_request() -> None:
    counts = Counts(1.0, 2.0)
    tensors = tensors_of([torch.ones(1)], counts=counts)
    payload = tensors.payload(include_state=True)
    assert payload.counts is not None
    payload.counts.fill_(9.0)
    tensors.settle(payload, counts=False)
    assert counts.values.tolist() == [1.0, 2.0]
    tensors.settle(payload, counts=True)
    assert counts.values.tolist() == [9.0, 9.0]


# The summary


def test_the_summary_tells_what_differs() -> None:
    checksum = Checksum(1, None)

    def summary(payload: Payload) -> Any:
        return payload.summary(checksum, consensus=1.0, outer=2.0)

    payload, own = full_payload()
    before = summary(payload)
    assert (before.consensus, before.outer) == (1.0, 2.0)
    assert before.describe("layout")["tensor 0"] == "parameter 0: float32 (2,) with strides (1,)"
    assert before.describe("state")["m"] == "float32 (4,) with strides (1,)"
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
