"""Row-wise Adagrad as an optimizer: FBGEMM's, torch's Adagrad on columns, embeddings, checkpoints, average by HDET."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.training import same


class Tables(nn.Module):
    """Two embedding tables of different width and dtype, whose rows are summed into one number."""

    def __init__(self, *, sparse: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = nn.Embedding(40, 6, sparse=sparse, dtype=dtype)
        self.bag = nn.EmbeddingBag(30, 4, mode="sum", sparse=sparse)

    def forward(self, rows: Tensor) -> Tensor:
        return (self.wide(rows).float() ** 2).sum() + (self.bag(rows.view(-1, 2)) * torch.arange(1.0, 5.0)).sum().tanh()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 30, (8,), generator=generator)).backward()
        optimizer.step()


def built(**options: Any) -> tuple[Tables, hk.FusedRowWiseAdagrad]:
    torch.manual_seed(0)
    model = Tables(**{name: options.pop(name) for name in ("sparse", "dtype") if name in options})
    return model, hk.FusedRowWiseAdagrad(model.parameters(), **{"lr": 0.1} | options)


def _fbgemm() -> Any:
    """Return FBGEMM's module of embedding tables, or skip: its wheels are built for one version of torch each."""
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tables
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"FBGEMM cannot be imported with torch {torch.__version__}: {' '.join(str(error).split())}")
    return tables


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM, about parts of it that need a GPU
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_tables_train_as_with_fbgemm(backend: str) -> None:
    """Without weight decay, which FBGEMM's implementation for the CPU does not apply."""
    fbgemm = _fbgemm()
    theirs = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)],
        optimizer=fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-3,
    )
    (weight,) = theirs.split_embedding_weights()
    weight.copy_(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
    begun = weight.clone()
    ours = nn.EmbeddingBag(50, 8, mode="sum", sparse=True, _weight=begun.clone())
    optimizer = hk.FusedRowWiseAdagrad(ours.parameters(), lr=0.1, eps=1e-3, backend=backend)
    ends = torch.arange(0, 31, 3)
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 40, (30,), generator=generator)  # some twice, and the last ten rows never
        factors = torch.randn(8, generator=generator)
        optimizer.zero_grad()
        (ours(rows, ends[:-1]).tanh() * factors).sum().backward()
        optimizer.step()
        (theirs(rows, ends).tanh() * factors).sum().backward()  # FBGEMM steps within backward
    ((sums,),) = theirs.split_optimizer_states()
    # float32 on both sides, with sums over a row in the order that suits each processor.
    torch.testing.assert_close(ours.weight.detach(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[ours.weight]["sum"].view(-1), sums.view(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(weight[40:], begun[40:])
    assert not torch.equal(weight[:40], begun[:40])


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_tables_of_one_column_train_as_with_torch(backend: str) -> None:
    torch.manual_seed(1)
    ours = nn.Embedding(50, 1, sparse=True)
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 1e-8}
    optimizers = (
        hk.FusedRowWiseAdagrad(ours.parameters(), **options, backend=backend),
        torch.optim.Adagrad(theirs.parameters(), **options),
    )
    for step in range(6):
        rows = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (module(rows) ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    first, second = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    torch.testing.assert_close(first["sum"][:, None], second["sum"])
    assert first["step"] == second["step"] == 6


def test_sparse_and_dense_gradients_give_the_same_rows() -> None:
    sparse, dense = built(sparse=True), built(sparse=False)
    for model, optimizer in (sparse, dense):
        trained(model, optimizer, 5)
    for one, other in zip(sparse[0].parameters(), dense[0].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_loading_keeps_the_flat_buffers_in_use() -> None:
    model, optimizer = built()
    trained(model, optimizer, 2)
    buckets, flats = optimizer.buckets, optimizer.state_flats()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.buckets is buckets
    assert all(optimizer.state_flats()[name] is flat for name, flat in flats.items())
    trained(model, optimizer, 2)
    assert set(optimizer.all_state_flats()) == {"0/sum", "0/step"}
    assert optimizer.step_flats()[0].tolist() == [4, 4]


def test_groups_and_moved_tables() -> None:
    model, _ = built()
    optimizer = hk.FusedRowWiseAdagrad([model.wide.weight], lr=0.1)
    optimizer.add_param_group({"params": [model.bag.weight], "lr": 0.0})
    frozen = model.bag.weight.detach().clone()
    trained(model, optimizer, 2)
    assert torch.equal(model.bag.weight, frozen)
    assert optimizer.state[model.wide.weight]["step"] == 2
    moved = model.wide.weight.detach().clone()
    model.wide.weight.data = moved
    trained(model, optimizer, 1)
    assert model.wide.weight.data_ptr() != moved.data_ptr(), "brought home"
    early, late = built(), built()
    late[0].double()  # before the first step the optimizer follows
    trained(*late, 2)
    assert late[1].state[late[0].wide.weight]["sum"].dtype == torch.float64
    trained(*early, 2)
    torch.testing.assert_close(early[0].wide.weight.double(), late[0].wide.weight, rtol=1e-5, atol=1e-5)
    late[0].float()
    with pytest.raises(RuntimeError, match="build the optimizer and its scheduler again"):
        late[1].step()


def test_what_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    for params, options, message in (
        ([nn.Parameter(torch.ones(3))], {}, "needs contiguous tables of at least two dimensions"),
        ([nn.Parameter(torch.ones(4, 3).T)], {}, "needs contiguous tables"),
        ([weight], {"lr": -1.0}, "lr must be a finite number of at least 0, got -1.0"),
        ([weight], {"decoupled_weight_decay": 2}, "decoupled_weight_decay must be True or False"),
        ([weight], {"stochastic_rounding": "yes"}, "stochastic_rounding must be True or False"),
        ([nn.Parameter(weight.half().detach())], {"stochastic_rounding": True}, "stochastic rounding is for bfloat16"),
        ([weight, nn.Parameter(weight.detach())], {}, "two parameters share their memory"),
        (list(hk.ReplicaStack(nn.Embedding(4, 3), 2).parameters()), {}, "use FusedAdagrad in a stack"),
    ):
        with pytest.raises(ValueError, match=message):
            hk.FusedRowWiseAdagrad(params, **options)
    model, optimizer = built()
    trained(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    for damage, message in (
        (lambda state: state["state"][0].pop("sum"), "has step; FusedRowWiseAdagrad needs sum"),
        (
            lambda state: state["state"].pop(1),
            "parameter 1 of group 0 has no entries; FusedRowWiseAdagrad needs step, sum",
        ),
        (
            lambda state: state["state"][0].update(sum=torch.ones(3)),
            r"has sum of shape \(3,\), its parameter has \(40, 6\)",
        ),
        (lambda state: state.pop("state"), "a dict with a dict 'state' and a list 'param_groups'"),
    ):
        damaged = copy.deepcopy(before)
        damage(damaged)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(damaged)
        assert same(optimizer.state_dict(), before)
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="does not clip, got max_grad_norm"):
        optimizer.step()
    optimizer.max_grad_norm = None
    model.wide.weight.grad = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (40, 6))
    with pytest.raises(RuntimeError, match="has 2 sparse dimensions, expected one"):
        optimizer.step()
    assert same(optimizer.state_dict(), before)


def _averaged(rank: int) -> tuple[Tensor, Tensor, int]:
    model, optimizer = built()
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, total_steps=12, cycle_momentum=False, sync_every=4, gradients="local", model=model
    )
    for step in range(12):
        optimizer.zero_grad()
        rows = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(rows)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return model.wide.weight.detach(), optimizer.state[model.wide.weight]["sum"].clone(), len(scheduler.history)


@pytest.mark.full
def test_replicas_are_averaged_in_place() -> None:
    (first, first_sums, syncs), (second, second_sums, _) = run_ranks(2, _averaged)
    assert syncs == 3
    assert torch.equal(first, second)
    assert torch.equal(first_sums, second_sums)
    assert first_sums.any()
