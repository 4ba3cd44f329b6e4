"""Distributed tensors in one process: parts, how they are divided, norms of parts, and what FSDP gathers from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import hdet_kernels as hk
from hdet_kernels.buckets import Buckets
from hdet_kernels.sharded import (
    distributed_like,
    divided_along,
    drop_gathered,
    gathered_shards,
    gradient_parts,
    is_distributed,
    norm_over_meshes,
    part_like,
    part_of,
    parts_of,
    why_unlike,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


HSDP = (Replicate(), Shard(0))


def test_tensors_that_are_not_distributed_stay_as_they_are() -> None:
    param, value = nn.Parameter(torch.ones(3)), torch.zeros(3)
    assert not is_distributed(param)
    assert part_of(param) is param
    assert divided_along(param) is None
    assert distributed_like(param, value) is part_like(param, value) is value
    assert why_unlike(param, value) is None


def test_a_part_is_the_memory_of_the_parameter(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, HSDP))
    assert is_distributed(param)
    assert part_of(param) is param._local_tensor
    assert divided_along(param) == (), "dimensions of one process divide nothing"
    moment = torch.ones(3, 2)
    made = distributed_like(param, moment)
    assert isinstance(made, DTensor)
    assert made.placements == HSDP
    assert part_of(made).data_ptr() == moment.data_ptr()


def test_parts_of_several(mesh: DeviceMesh) -> None:
    plain, param = torch.ones(2), nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, HSDP))
    for tensors in ([plain], [param], [plain, param]):
        expected = [part_of(tensor) for tensor in tensors]
        assert all(a is b for a, b in zip(parts_of(tensors)(tensors), expected, strict=True))


def test_parts_of_values_that_are_divided_alike_otherwise_or_not_at_all(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, HSDP))
    value = torch.arange(6.0).view(3, 2)
    alike = distribute_tensor(value, mesh, HSDP)
    assert part_like(param, alike).data_ptr() == part_of(alike).data_ptr()
    for other in (value, distribute_tensor(value, mesh, (Shard(1), Replicate()))):
        assert why_unlike(param, other) is None
        assert torch.equal(part_like(param, other), value)
    assert "is distributed, and its parameter is not" in str(why_unlike(torch.zeros(3, 2), alike))
    elsewhere = distribute_tensor(value, mesh["shard"], [Shard(0)])
    assert "load it with torch.distributed.checkpoint" in str(why_unlike(param, elsewhere))


def test_gradients_may_be_missing_or_sums_that_are_not_formed_yet(mesh: DeviceMesh) -> None:
    params = [nn.Parameter(distribute_tensor(torch.zeros(2), mesh, HSDP)) for _ in range(3)]
    pending = DTensor.from_local(torch.ones(2), mesh, (Partial(), Shard(0)))
    first, second, third = gradient_parts(params, [None, distribute_tensor(torch.ones(2) * 3, mesh, HSDP), pending])
    assert first is None
    assert second is not None
    assert third is not None
    assert (second.tolist(), third.tolist()) == ([3, 3], [1, 1])


def test_norms_of_several_buffers_are_one() -> None:
    norms = [(torch.tensor(3.0), None), (torch.tensor(4.0), ()), (torch.tensor(12.0), None)]
    assert norm_over_meshes(norms).item() == 13
    assert norm_over_meshes([(torch.tensor(torch.inf), ()), (torch.tensor(1.0), None)]).item() == torch.inf


def test_a_parameter_that_is_a_pending_sum_is_refused_before_anything_is_moved(mesh: DeviceMesh) -> None:
    fine = nn.Parameter(torch.ones(2))
    address = fine.data_ptr()
    pending = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate())))
    with pytest.raises(ValueError, match=r"parameter 1 is a DTensor with placements .* redistribute it"):
        Buckets([fine, pending])
    assert fine.data_ptr() == address


def test_distributed_and_other_parameters_have_buffers_of_their_own(mesh: DeviceMesh) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, HSDP))]
    optimizer = hk.FusedSGD(params, lr=1.0, momentum=0.5)
    assert len(optimizer.buckets.flats) == 2
    params[1].grad = distribute_tensor(torch.ones(3, 2), mesh, HSDP)
    optimizer.step()
    assert params[1].full_tensor().tolist() == [[0, 0]] * 3
    assert params[0].tolist() == [1, 1], "no gradient"
    assert isinstance(optimizer.state[params[1]]["momentum_buffer"], DTensor)


def test_state_of_parameters_that_fsdp_offloads_is_where_they_are(mesh: DeviceMesh) -> None:
    """The mesh is one of GPUs, and the parts lie on the CPU. No GPU is needed, since nothing is sent."""
    gpus = DeviceMesh("cuda", [0], mesh_dim_names=("shard",), _init_backend=False)

    def offloaded(part: torch.Tensor) -> DTensor:
        meta = TensorMeta(part.shape, part.stride(), part.dtype)
        return DTensor(part, DTensorSpec(gpus, (Shard(0),), meta), requires_grad=False)

    param = nn.Parameter(offloaded(torch.ones(4, 3)))
    param.grad = offloaded(torch.full((4, 3), 2.0))
    optimizer = hk.FusedAdamW([param], lr=0.1, weight_decay=0.0)
    optimizer.step()
    state = optimizer.state[param]["exp_avg"]
    assert (state.device_mesh, state.placements) == (gpus, (Shard(0),))
    torch.testing.assert_close(part_of(state), torch.full((4, 3), 0.2))
    torch.testing.assert_close(part_of(param.detach()), torch.full((4, 3), 0.9))
    saved = optimizer.state_dict()
    again = hk.FusedAdamW([nn.Parameter(offloaded(torch.ones(4, 3)))], lr=0.1)
    again.load_state_dict(saved)
    (loaded,) = again.state.values()
    assert torch.equal(part_of(loaded["exp_avg"]), part_of(state))


# The memory from which FSDP gathers


def test_fsdp_gathers_what_lies_in_the_buckets(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for part in (module[0], module):
        fully_shard(part, mesh=mesh)
    params = list(module.parameters())
    shards = gathered_shards(params)
    assert sorted(shards) == sorted(map(id, params))
    assert [shards[id(param)].padded for param in params] == [6, 2, 2, 1]
    assert not any(shard.pinned for shard in shards.values())
    buckets = Buckets(params)
    for value in (0.25, 1.25):  # before and after FSDP's first forward pass, which looks at the memory
        buckets.flats[0].fill_(value)
        drop_gathered(params)  # the forward pass before leaves the parameters of the root gathered
        assert module(torch.ones(1, 3)).item() == pytest.approx(2 * value * (4 * value) + value)
    assert buckets.moved() == []


def test_other_distributed_parameters_have_no_record(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]))
    assert gathered_shards([param, nn.Parameter(torch.ones(2))]) == {}


def test_another_version_of_torch_is_an_error_before_anything_is_moved(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    address = module.weight._local_tensor.data_ptr()
    monkeypatch.delattr(_composable_state, "_module_state_mapping")
    with pytest.raises(RuntimeError, match=r"torch .* does not keep sharded parameters .* use torch 2.11"):
        hk.FusedAdamW(module.parameters())
    assert module.weight._local_tensor.data_ptr() == address
