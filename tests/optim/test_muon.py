"""FusedMuon against torch.optim.Muon and AdamW: numbers, groups and checkpoints.

torch.optim.Muon rounds to bfloat16 within Newton–Schulz. The momentum here agrees with torch's up to the last bit or
two of float32. Where such a bit decides a rounding to bfloat16, an element of the update differs by some units of
bfloat16 (2⁻⁸), which the iteration carries on. ``UPDATE`` bounds that: the difference of an update, whose elements have
a root mean square of 1/√max(rows, columns).
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.tensor
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.optim import muon
from hdet_kernels.optim.muon import ROW_SQUARES, MuonGroup
from hdet_kernels.stack import StackedParameter
from tests.ops.cases import BACKENDS, QUICK, interpreted
from tests.optim.cases import assert_equal, choose_backends
from tests.ranks import run_ranks

#: Wide, tall and square matrices, several of one shape, a row and a column.
MATRICES = ((12, 20), (20, 12), (8, 8), (12, 20), (8, 8), (5, 1), (1, 7))


#: With parameters that AdamW trains, among them.
MIXED = ((12, 20), (7,), (20, 12), (12, 20), (), (8, 8), (2, 3, 4))


LR = 0.02


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def give(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], seeds: range) -> None:
    for seed in seeds:
        give(params, seed)
        optimizer.step()


def stepped(optimizer: hk.FusedMuon, seeds: range = range(1)) -> hk.FusedMuon:
    run(optimizer, [param for group in optimizer.param_groups for param in group["params"]], seeds)
    return optimizer


#: The largest difference of one element of an orthogonal update, in root mean squares of its elements.
UPDATE = 0.1


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum": {"nesterov": False, "momentum": 0.4},
    "original": {"adjust_lr_fn": "original", "weight_decay": 0.0},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    "other polynomial": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 4, "eps": 1e-3},
}


def few(cases: dict[str, Any], backend: tuple[str, str]) -> list[tuple[str, Any]]:
    """Return the cases; the first and the last with Triton's interpreter, which takes seconds for each."""
    listed = list(cases.items())
    return listed[:: len(listed) - 1] if interpreted(backend) else listed


def ratio(shape: Sequence[int], adjust: str | None) -> float:
    rows, columns = shape
    return 0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5


def assert_within_bfloat16(ours: Sequence[Tensor], theirs: Sequence[Tensor], steps: int, adjust: str | None) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        spread = LR * ratio(mine.shape, adjust) / max(mine.shape) ** 0.5
        difference = (mine.detach().cpu() - other).abs().max().item()
        assert difference <= steps * UPDATE * spread, (tuple(mine.shape), difference / spread)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without products of bfloat16
@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_matrices_step_as_with_torch(backend: tuple[str, str]) -> None:
    where, device = backend
    for name, options in few(SETTINGS, backend):
        ours, theirs = parameters(MATRICES, device=device), parameters(MATRICES)
        mine = hk.FusedMuon(ours, LR, **options, backend=where)
        other = torch.optim.Muon(theirs, LR, **options)
        for step in range(3):
            run(mine, ours, range(step, step + 1))
            run(other, theirs, range(step, step + 1))
            assert_within_bfloat16(ours, theirs, step + 1, options.get("adjust_lr_fn"))
            for param, twin in zip(ours, theirs, strict=True):
                buffer, expected = mine.state[param]["momentum_buffer"], other.state[twin]["momentum_buffer"]
                torch.testing.assert_close(buffer.cpu(), expected, rtol=1e-6, atol=1e-6, msg=name)


def test_other_parameters_step_as_with_adamw_and_are_clipped_together() -> None:
    ours, theirs = parameters(MIXED), parameters(MIXED)
    given: dict[str, Any] = {"adamw_lr": 0.01, "adamw_betas": (0.8, 0.9), "adamw_weight_decay": 0.2}
    mine = hk.FusedMuon(ours, LR, **given, max_grad_norm=1.0)
    matrices = [param for param in theirs if param.dim() == 2]
    rest = [param for param in theirs if param.dim() != 2]
    others = (hk.FusedMuon(matrices, LR), hk.FusedAdamW(rest, 0.01, (0.8, 0.9), weight_decay=0.2))
    for seed in range(3):
        run(mine, ours, range(seed, seed + 1))
        give(theirs, seed)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        for other in others:
            other.step()
    for param, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-3 if param.dim() == 2 else 1e-6)


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "cpp-cpu"))
def test_normuon_follows_its_equations(backend: tuple[str, str]) -> None:
    where, device = backend
    beta2, shape = 0.9, (12, 20)
    ours, theirs = parameters([shape] * 2, device=device), parameters([shape] * 2, device=device)
    mine = hk.FusedMuon(ours, LR, weight_decay=0.0, normuon=True, normuon_beta2=beta2, backend=where)
    plain = hk.FusedMuon(theirs, LR, weight_decay=0.0, backend=where)
    squares = [torch.zeros(12, 1, dtype=torch.float64) for _ in ours]
    for seed in range(3):
        before = [(a.detach().clone(), b.detach().clone()) for a, b in zip(ours, theirs, strict=True)]
        run(mine, ours, range(seed, seed + 1))
        run(plain, theirs, range(seed, seed + 1))
        for index, (own, other) in enumerate(before):
            update = ((other - theirs[index].detach()) / LR).cpu().double()  # O, from the plain step
            squares[index] = beta2 * squares[index] + (1 - beta2) * update.square().mean(1, keepdim=True)
            normed = update / (squares[index].sqrt() + 1e-10)
            expected = LR * normed * update.norm() / normed.norm()
            got = (own - ours[index].detach()).cpu().double()
            # The result is rounded to bfloat16.
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=2e-7)
            state = mine.state[ours[index]][ROW_SQUARES].cpu().double()
            torch.testing.assert_close(state, squares[index], rtol=1e-4, atol=1e-7)


def test_groups_without_use_muon_are_divided() -> None:
    matrix, head, vector, scalar = parameters([(4, 3), (5, 4), (3,), ()])
    optimizer = hk.FusedMuon([("hidden", matrix), ("bias", vector)], LR, adamw_lr=0.003)
    assert [(group["use_muon"], group["lr"], group["param_names"]) for group in optimizer.param_groups] == [
        (True, LR, ["hidden"]),
        (False, 0.003, ["bias"]),
    ]
    # As in SingleDeviceMuonWithAuxAdam.
    plain = {"use_muon": False, "lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-10, "weight_decay": 0.0}
    optimizer.add_param_group({"params": [("head", head)], **plain})
    assert optimizer.param_groups[2]["adamw_betas"] == (0.7, 0.8)
    assert "exp_avg" in copy.deepcopy(stepped(optimizer)).state_dict()["state"][2]
    # The numbers of a group without matrices are AdamW's, those of a mixed one the matrices'.
    mixed = hk.FusedMuon([{"params": [matrix.detach().clone().requires_grad_(), scalar], "lr": 0.5, "adamw_lr": 0.25}])
    assert [group["lr"] for group in mixed.param_groups] == [0.5, 0.25]
    assert [group["lr"] for group in hk.FusedMuon([{"params": [vector], "lr": 0.5}]).param_groups] == [0.5]


@pytest.mark.parametrize(
    ("given", "lr", "betas"),
    [
        ({"adamw_lr": 0.25, "adamw_betas": (0.7, 0.8)}, 0.25, (0.7, 0.8)),
        # Its own names count, wherever the others come from, as the defaults of a wrapper.
        ({"lr": 0.5, "adamw_lr": 0.25, "betas": (0.5, 0.6), "adamw_betas": (0.7, 0.8)}, 0.5, (0.5, 0.6)),
    ],
)
def test_a_group_that_adamw_trains_takes_both_of_its_names(
    given: dict[str, Any], lr: float, betas: tuple[float, float]
) -> None:
    (vector,) = parameters([(3,)])
    (group,) = hk.FusedMuon([{"params": [vector], "use_muon": False, **given}]).param_groups
    assert (group["lr"], group["adamw_betas"]) == (lr, betas)
    assert not {"adamw_lr", "betas"} & group.keys()


#: Options that are refused, with the argument that the message names.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"ns_steps": 100}, "ns_steps"),
    ({"ns_coefficients": (1.0, 2.0)}, "3 numbers"),
    ({"adjust_lr_fn": "other"}, "adjust_lr_fn"),
    ({"momentum": -0.1}, "momentum"),
    ({"adamw_lr": -1.0}, "lr"),
    ({"adamw_betas": (0.9, 1.0)}, "betas"),
    ({"normuon": True, "normuon_beta2": 1.0}, "normuon_beta2"),
    ({"normuon": 2}, "normuon"),
)


def test_bad_arguments_are_refused_before_anything_moves() -> None:
    params = parameters([(4, 3), (3,)])
    addresses = [param.data_ptr() for param in params]
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            hk.FusedMuon(params, **options)
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters, parameter 1 has size \(3,\)"):
        hk.FusedMuon([{"params": params, "use_muon": True}])
    assert [param.data_ptr() for param in params] == addresses
    optimizer = hk.FusedMuon(params)
    with pytest.raises(ValueError, match="momentum must be"):
        optimizer.add_param_group({"params": parameters([(2, 2), (2,)]), "momentum": -1.0})
    optimizer.param_groups[0]["per_replica"] = {"eps": ()}
    with pytest.raises(ValueError, match="eps of matrices cannot differ between replicas"):
        stepped(optimizer)
    assert len(optimizer.param_groups) == 2


def test_parameters_without_a_matrix_are_told(caplog: pytest.LogCaptureFixture) -> None:
    hk.FusedMuon(parameters([(4, 3), (3,)]), LR)
    assert not caplog.messages
    hk.FusedMuon(parameters([(12,), (3,)]), LR)
    (message,) = caplog.messages
    assert "no matrix: AdamW trains all 2 parameters" in message


def test_shards_of_matrices_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        shard = torch.distributed.tensor.distribute_tensor(torch.ones(4, 3), mesh)
        with pytest.raises(ValueError, match="is a shard, and Muon orthogonalises whole matrices"):
            hk.FusedMuon([nn.Parameter(shard)])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without products of bfloat16
def test_state_dicts_load_into_torch_and_back() -> None:
    theirs, ours = parameters(MATRICES), parameters(MATRICES)
    other = torch.optim.Muon(theirs, LR)
    run(other, theirs, range(2))
    mine = hk.FusedMuon(ours)
    with torch.no_grad():
        for param, twin in zip(ours, theirs, strict=True):
            param.copy_(twin)
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    assert mine.param_groups[0]["lr"] == LR
    back = torch.optim.Muon(theirs)
    back.load_state_dict(copy.deepcopy(mine.state_dict()))
    for param, twin in zip(ours, theirs, strict=True):
        assert torch.equal(back.state[twin]["momentum_buffer"], other.state[twin]["momentum_buffer"])
        assert torch.equal(mine.state[param]["momentum_buffer"], other.state[twin]["momentum_buffer"])
    run(mine, ours, range(2, 3))
    run(back, theirs, range(2, 3))
    assert_within_bfloat16(ours, theirs, 1, None)
    by_adamw = hk.FusedMuon([{"params": parameters(MATRICES), "use_muon": False}])
    with pytest.raises(ValueError, match="group 0 has use_muon=False here and True"):
        by_adamw.load_state_dict(other.state_dict())
    divided = hk.FusedMuon(parameters([(4, 3), (3,)]))
    with pytest.raises(
        ValueError, match=r"has 1 parameter groups, this optimizer has 2 \(Muon, AdamW; a group without"
    ):
        divided.load_state_dict(other.state_dict())


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {"normuon": True}),
    "bf16-master": (torch.bfloat16, {"normuon": True}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    "fp16-fixed": (torch.float16, {"gradients": "fixed"}),
    "fp32-int8": (torch.float32, {"state_dtype": "int8", "normuon": True}),
}


@pytest.mark.parametrize("backend", choose_backends(QUICK, "cpp-cpu"))
def test_a_run_resumes_bit_for_bit_in_every_precision(backend: tuple[str, str]) -> None:
    where, device = backend
    for name, (dtype, options) in PRECISIONS.items():
        whole, part = parameters(MIXED, dtype, device), parameters(MIXED, dtype, device)
        stepped(hk.FusedMuon(whole, LR, **options, backend=where), range(4))
        first = stepped(hk.FusedMuon(part, LR, **options, backend=where), range(2))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        resumed = [nn.Parameter(param.detach().clone()) for param in part]
        second = hk.FusedMuon(resumed, **options, backend=where)
        second.load_state_dict(torch.load(file, weights_only=True))
        stepped(second, range(2, 4))
        assert_equal(resumed, whole)
        exact = parameters(MIXED, torch.float64)
        stepped(hk.FusedMuon(exact, LR, normuon=options.get("normuon", False), backend="torch"), range(4))
        for mine, truth in zip(resumed, exact, strict=True):
            if options.get("state_dtype") == "int8":  # too coarse to be compared: Newton–Schulz amplifies it
                continue
            tolerance = 4 * torch.finfo(dtype).eps * truth.abs().max().item() + 4 * UPDATE * LR
            assert (mine.cpu().double() - truth).abs().max() <= tolerance, name


@pytest.mark.parametrize("backend", choose_backends(QUICK, "torch-cpu", "cpp-cpu"))
def test_a_skipped_step_changes_nothing_and_a_scale_is_undone(backend: tuple[str, str]) -> None:
    where, device = backend
    params, plain = parameters(MIXED, device=device), parameters(MIXED, device=device)
    optimizer = hk.FusedMuon(params, LR, normuon=True, backend=where)
    run(optimizer, params, range(1))
    kept = [param.detach().clone() for param in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    give(params, 1, scale=float("inf"))
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.grad_scale = torch.full((), 4.0, device=device)
    optimizer.step()
    assert_equal(params, kept)
    for index, entries in optimizer.state_dict()["state"].items():
        assert_equal(entries.values(), state[index].values())
    optimizer.found_inf.zero_()
    give(params, 1, scale=4.0)
    optimizer.step()
    run(hk.FusedMuon(plain, LR, normuon=True, backend=where), plain, range(2))
    assert_equal(params, plain)


SHAPES = ((4, 6), (6, 4), (4, 6), (4, 6), (5, 5), (4, 6), (3,))


def trained(stacked: bool, options: dict[str, object]) -> tuple[list[torch.Tensor], MuonGroup]:
    generator = torch.Generator().manual_seed(0)
    params: list[torch.Tensor] = []
    for shape in SHAPES:
        value = torch.randn(shape, generator=generator)
        params.append(
            StackedParameter(value.expand(3, *shape).clone(), shares_gradient=False) if stacked else nn.Parameter(value)
        )
    optimizer = hk.FusedMuon(params, 0.02, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    group = optimizer._flat_groups[0]
    assert isinstance(group, MuonGroup)
    return [param.detach().clone() for param in params], group


@pytest.mark.parametrize("stacked", [False, True], ids=["plain", "stack"])
def test_pieces_of_any_size_give_the_same_numbers(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"normuon": True, "state_dtype": torch.bfloat16}
    whole, group = trained(stacked, options)
    assert len(group._pieces) == 3
    assert [len(piece.slots) * len(piece.replicas) for piece in group._pieces] == ([12, 3, 3] if stacked else [4, 1, 1])
    for elements, counts in ((1, (1, 1, 1)), (2 * 24, (2, 1, 1))):
        monkeypatch.setattr(muon, "PIECE_ELEMENTS", elements)
        parts, group = trained(stacked, options)
        for mine, other in zip(parts, whole, strict=True):
            assert torch.equal(mine, other)
        # The scratch memory is that of one piece.
        held = {piece.update.untyped_storage().data_ptr(): piece.update for piece in group._pieces}
        assert len(held) == 1
        assert max(len(piece.slots) for piece in group._pieces) == counts[0]
        (scratch,) = held.values()
        assert scratch.untyped_storage().nbytes() <= 2 * max(elements + 16, 32) + 64


def test_changed_settings_take_effect_at_the_next_step() -> None:
    params = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optimizer = hk.FusedMuon(params, 0.5, weight_decay=0.0)
    for expected in (1.0, 0.2 * 4**0.5):
        before = params[0].detach().clone()
        for param in params:
            param.grad = torch.eye(4)
        optimizer.step()
        moved = (before - params[0].detach()).diagonal().mean() / 0.5
        assert 0.6 * expected < moved < 1.3 * expected
        optimizer.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("backend", choose_backends(QUICK, "torch-cpu", "cpp-cpu"))
def test_replicas_of_a_stack_step_as_if_alone(
    backend: tuple[str, str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one gradient for all, the update is orthogonalised once; each replica has its own rate and decay."""
    where, device = backend
    count = 3
    rates, decays, adamw = (0.01, 0.02, 0.03), (0.1, 0.2, 0.3), (1e-3, 2e-3, 3e-3)
    shapes, missing = MIXED, 3
    start = [param.detach() for param in parameters(shapes, device=device)]
    stack = [StackedParameter(torch.stack([each] * count), shares_gradient=shared) for each in start]
    options: dict[str, Any] = {"max_grad_norm": 1.0, "normuon": True, "backend": where}
    optimizer = hk.FusedMuon(stack, **options)
    optimizer.param_groups[0]["per_replica"] = {"lr": rates, "weight_decay": decays}
    optimizer.param_groups[1]["per_replica"] = {"lr": adamw}
    alone = [[nn.Parameter(each.clone()) for each in start] for _ in range(count)]
    singles = [
        hk.FusedMuon(params, rate, decay, adamw_lr=other, **options)
        for params, rate, decay, other in zip(alone, rates, decays, adamw, strict=True)
    ]
    orthogonalised: list[int] = []
    original = muon.orthogonalise_

    def counting(x: Tensor, *arguments: Any, **named: Any) -> None:
        orthogonalised.append(len(x))
        original(x, *arguments, **named)

    for step in range(3):
        for replica, (params, single) in enumerate(zip(alone, singles, strict=True)):
            give(params, step if shared else step + 10 * replica)
            if step == 1:
                params[missing].grad = None
            single.step()
        for index, param in enumerate(stack):
            each = [params[index].grad for params in alone]
            if each[0] is not None:
                param.grad = each[0].expand_as(param) if shared else torch.stack(each)
            else:
                param.grad = None
        with monkeypatch.context() as patch:
            patch.setattr(muon, "orthogonalise_", counting)
            optimizer.step()
    matrices = sum(len(shape) == 2 for shape in shapes)
    assert sum(orthogonalised) == 3 * matrices * (1 if shared else count)
    assert len(orthogonalised) == 3 * 3, "three shapes, each at once"
    for index, param in enumerate(stack):
        own = [params[index].detach() for params in alone]
        if device == "cpu" or shared:
            assert_equal(param.detach().unbind(), own)
            continue
        # cuBLAS chooses its kernels by the number of matrices, which are rounded to bfloat16 after every product.
        for got, expected, rate in zip(param.detach().unbind(), own, rates, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0.03 * rate)


def test_both_learning_rates_are_explored_apart() -> None:
    """OneCycleLR cycles the momentum of the matrices as with torch.optim.Muon, and betas stay."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    stack = hk.ReplicaStack(net, replicas=4)
    optimizer = hk.FusedMuon(stack.parameters(), lr=0.01, adamw_lr=0.01)
    scheduler = hk.HDETOneCycleLR(
        optimizer, [0.01, 0.01], total_steps=20, sync_every=5, ensemble=stack.ensemble, auto_lr=False, seed=3
    )
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)
    momenta = set()
    for _ in range(20):
        losses = stack.backward(lambda model, x, y: (model(x) - y).square().mean(), inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        momenta.add(optimizer.param_groups[0]["momentum"])
    orders = set()
    for record in scheduler.history:
        assert set(record.values) == {"lr/0", "lr/1"}
        assert all(len(set(values)) == 4 for values in record.values.values())
        orders.add(tuple(tuple(sorted(range(4), key=values.__getitem__)) for values in record.values.values()))
    assert any(matrices != rest for matrices, rest in orders), "each has permutations of its own"
    assert len(momenta) > 10
    assert optimizer.param_groups[1]["adamw_betas"] == (0.9, 0.999)
    assert optimizer.shares_state


def _two_ranks(rank: int) -> dict[str, Any]:
    """Train with gradients of this rank, through two syncs, and return what the ranks compare."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hk.FusedMuon(net.parameters(), lr=0.01, adamw_lr=0.001, normuon=True)
    scheduler = hk.HDETOneCycleLR(
        optimizer, [0.01, 0.001], total_steps=16, sync_every=4, auto_lr=False, gradients="local"
    )
    generator = torch.Generator().manual_seed(rank)
    apart = False
    for step in range(8):
        loss = (net(torch.randn(16, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
        apart = apart or (step % 4 == 1 and not scheduler.in_sync)
    rates = [group["lr"] for group in optimizer.param_groups]
    flats = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    return {"params": [p.detach().clone() for p in net.parameters()], "state": flats, "apart": apart, "rates": rates}


@pytest.mark.full
def test_two_ranks_average_parameters_and_state_of_both_parts() -> None:
    first, second = run_ranks(2, _two_ranks)
    assert_equal(first["params"], second["params"])
    assert first["state"].keys() == {
        "0/momentum_buffer",
        f"0/{ROW_SQUARES}",
        "0/step",
        "1/exp_avg",
        "1/exp_avg_sq",
        "1/step",
    }
    assert_equal(first["state"].values(), second["state"].values())
    assert all(bool(flat.any()) for flat in first["state"].values())
    assert first["apart"]
    assert all(mine != other for mine, other in zip(first["rates"], second["rates"], strict=True))


def _in_zero(rank: int) -> list[list[Tensor]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import takes seconds

    found = []
    for wrap in (lambda params: hk.FusedMuon(params), lambda params: ZeroRedundancyOptimizer(params, hk.FusedMuon)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        matrices, others = ([p for p in net.parameters() if (p.dim() == 2) is kind] for kind in (True, False))
        groups = [{"params": matrices, "use_muon": True, "lr": LR}, {"params": others, "use_muon": False, "lr": 0.003}]
        optimizer = wrap(groups)
        for _ in range(3):
            for param in net.parameters():
                param.grad = torch.randn(param.shape)
            optimizer.step()
        found.append([param.detach().clone() for param in net.parameters()])
    return found


@pytest.mark.full
def test_zero_redundancy_runs_it_with_groups_that_say_what_trains_them() -> None:
    for alone, ours in run_ranks(2, _in_zero):
        for mine, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
