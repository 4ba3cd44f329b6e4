"""State in 8 bits as the optimizers show, save, load and average it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import AverageRequest, Report, converger_of
from hdet_kernels.ops.torch.companding import BLOCK, block_count
from hdet_kernels.optim import decoded_state_dict
from hdet_kernels.optim.coded_state import decoded, decoded_entries, scale_name
from hdet_kernels.schedule.undo.copies import reset_others, state_pairs, whole_state
from tests.optim.cases import FUSED, PAIRS, fused_optimizer, parameters, run, saved_and_loaded, torch_optimizer
from tests.training import same

NAMES = ("sgd-momentum", "adam", "adamw", "adagrad", "lion")


def trained(name: str, steps: int = 3, **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = parameters()
    optimizer = fused_optimizer(name, params, state_dtype="int8", **options)
    run(optimizer, params, range(steps))
    return params, optimizer


def entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_parameter_is_codes_and_scales_in_the_flat_buffers(name: str) -> None:
    params, optimizer = trained(name)
    flats = optimizer.all_state_flats()
    for param, entry in zip(params, entries(optimizer), strict=True):
        for state in optimizer.state_names(optimizer.param_groups[0]):
            codes, scales = entry[state], entry[scale_name(state)]
            assert (codes.dtype, codes.shape, codes.stride()) == (torch.uint8, param.shape, param.stride())
            assert (scales.dtype, scales.shape) == (torch.float32, (block_count(param.numel()),))
            for part, whole in ((codes, flats[f"0/{state}"]), (scales, flats[f"0/{scale_name(state)}"])):
                start, bytes_of_whole = whole.data_ptr(), whole.nbytes
                assert not part.numel() or start <= part.data_ptr() < start + bytes_of_whole
        assert "step" in entry, "stochastic rounding goes on from it"
    assert optimizer.param_groups[0]["rounding_seed"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_are_close_to_those_with_float32_state(name: str) -> None:
    params, plain = trained(name, steps=20)[0], parameters()
    run(fused_optimizer(name, plain), plain, range(20))
    mine, theirs, before = (torch.cat([p.detach().flatten() for p in each]) for each in (params, plain, parameters()))
    # Lion's steps are signs, which change where a moment is near zero.
    assert (mine - theirs).norm() <= (0.1 if name == "lion" else 0.05) * (theirs - before).norm()


@pytest.mark.parametrize("name", NAMES)
def test_float32_state_is_loaded_to_the_nearest_codes(name: str) -> None:
    """Of a fused optimizer, and of torch.optim where it has the rule."""
    makers = [fused_optimizer, torch_optimizer] if name in PAIRS else [fused_optimizer]
    for make in makers:
        params, target = parameters(), parameters()
        source = make(name, params)
        run(source, params, range(3))
        optimizer = fused_optimizer(name, target, state_dtype=torch.int8)
        optimizer.load_state_dict(saved_and_loaded(source.state_dict()))
        for mine, theirs in zip(entries(optimizer), entries(source), strict=True):
            numbers = decoded_entries(mine)
            for state in optimizer.state_names(optimizer.param_groups[0]):
                # Half of the widest step, at the top: (1 - (126/127)²)/2 and (1 - (509/511)⁴)/2 of the scale.
                largest = theirs[state].abs().max() if theirs[state].numel() else torch.zeros(())
                assert ((numbers[state] - theirs[state]).abs() <= 0.0079 * largest + 1e-30).all()
        run(optimizer, target, range(1))


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_loaded_into_float32_state_and_torch_takes_the_decoded_ones(name: str) -> None:
    _, source = trained(name)
    state_dict = decoded_state_dict(saved_and_loaded(source.state_dict()))
    values = [
        {state: decoded_entries(entry)[state] for state in source.state_names(group)}
        for group in source.param_groups
        for entry in entries(source)
    ]
    optimizer = fused_optimizer(name, parameters())
    for given in (source.state_dict(), state_dict):
        optimizer.load_state_dict(given)
        for mine, theirs in zip(entries(optimizer), values, strict=True):
            assert not any(key.endswith("_scale") for key in mine)
            for state, value in theirs.items():
                assert torch.equal(mine[state], value)
    if name in PAIRS:
        params = parameters()
        torchs = torch_optimizer(name, params)
        torchs.load_state_dict(state_dict)
        run(torchs, params, range(1))


def test_codes_are_loaded_bit_for_bit_and_survive_a_new_group_and_a_copy() -> None:
    _, source = trained("adam")
    before = copy.deepcopy(entries(source))
    target = fused_optimizer("adam", parameters(), state_dtype="int8")
    target.load_state_dict(saved_and_loaded(source.state_dict()))
    assert same(entries(target), before)
    target.add_param_group({"params": [nn.Parameter(torch.ones(700))]})
    assert same(entries(target)[: len(before)], before)
    assert same(entries(copy.deepcopy(source)), before)
    source.load_state_dict(source.state_dict())
    assert same(entries(source), before)


def test_codes_of_another_memory_order_are_encoded_anew() -> None:
    shape = (20, 3, 4, 5)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    state_dicts = []
    for layout in (torch.channels_last, torch.contiguous_format):
        param = nn.Parameter(torch.zeros(shape).to(memory_format=layout))
        optimizer = hk.FusedSGD([param], lr=0.1, momentum=0.9, state_dtype="int8")
        param.grad = values.to(memory_format=layout)
        optimizer.step()
        state_dicts.append(saved_and_loaded(optimizer.state_dict()))
    of_other_order, _ = state_dicts
    optimizer.load_state_dict(of_other_order)
    entry = optimizer.state[param]
    got = decoded("momentum_buffer", entry["momentum_buffer"], entry["momentum_buffer_scale"])
    assert (got - values).abs().max() <= 0.025 * values.abs().max()


def test_a_state_with_damaged_scales_is_refused() -> None:
    params, optimizer = trained("adamw")
    before = copy.deepcopy(entries(optimizer))
    for change, message in (
        (lambda entry: entry.pop("exp_avg_scale"), "exp_avg in 8 bits with exp_avg_scale None"),
        (lambda entry: entry.update(exp_avg_scale=torch.zeros(3)), r"expected \(17,\); the file is damaged"),
        (lambda entry: entry.update(exp_avg_scale=torch.zeros(17).double()), "expected a float32 tensor"),
        (lambda entry: entry.update(exp_avg=torch.zeros(4097)), "does not know exp_avg_scale"),
        (lambda entry: entry.update(exp_avg=torch.zeros(4, dtype=torch.uint8)), "exp_avg of shape"),
        (lambda entry: entry.update(master=torch.zeros(4097, dtype=torch.uint8)), "master=torch.uint8"),
    ):
        state_dict = copy.deepcopy(optimizer.state_dict())
        change(state_dict["state"][2])
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert same(entries(optimizer), before)
    optimizer.state[params[2]] = {"step": torch.tensor(1.0), "exp_avg": before[2]["exp_avg"]}
    with pytest.raises(KeyError, match="exp_avg_scale"):
        optimizer.state_dict()


def stack_of(replicas: int, **options: Any) -> tuple[hk.ReplicaStack, hk.FusedAdamW]:
    torch.manual_seed(0)
    stack = hk.ReplicaStack(nn.Linear(BLOCK + 3, 9), replicas, **options)
    return stack, hk.FusedAdamW(stack.parameters(), lr=0.01, state_dtype="int8")


def step_stack(stack: hk.ReplicaStack, optimizer: hk.FusedAdamW, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        stack.backward(lambda model, x: model(x).square().mean(), torch.randn(12, BLOCK + 3, generator=generator))
        optimizer.step()


def test_the_replicas_of_a_stack_share_codes_and_separate_them() -> None:
    stack, optimizer = stack_of(3)
    step_stack(stack, optimizer)
    weight = next(iter(stack.parameters()))
    shared = {name: value.clone() for name, value in optimizer.state[weight].items()}
    assert shared["exp_avg"].shape == weight.shape[1:]
    optimizer.separate_state()
    own = optimizer.state[weight]
    assert own["exp_avg_scale"].shape == (3, block_count(weight[0].numel()))
    for row in range(3):
        assert all(torch.equal(own[name][row], shared[name]) for name in shared)
    saved = saved_and_loaded(optimizer.state_dict())
    optimizer.share_state()
    assert all(torch.equal(optimizer.state[weight][name], shared[name]) for name in shared)
    optimizer.load_state_dict(saved)
    assert not optimizer.shares_state
    step_stack(stack, optimizer)

    # Another number of replicas: the mean of their states, which are equal here.
    other_stack, other = stack_of(2)
    other.load_state_dict(saved)
    found = other.state[next(iter(other_stack.parameters()))]
    assert all(torch.equal(found[name], shared[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):  # decoded and encoded again
        torch.testing.assert_close(found[name], shared[name], rtol=1e-6, atol=0)


def test_replicas_with_their_own_states_are_averaged() -> None:
    stack, optimizer = stack_of(2, gradients="local")
    step_stack(stack, optimizer)
    before = {name: flat.clone() for name, flat in optimizer.state_flats().items()}
    codes = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    converger = converger_of(optimizer, stack.ensemble, model=stack)
    converger.converge(Report(1), AverageRequest(average_state=False))
    for name, flat in optimizer.all_state_flats().items():
        assert torch.equal(flat, codes[name]), "what is not averaged is not encoded again"
    assert converger.converge(Report(1), AverageRequest(average_state=True)).state
    for name, flat in optimizer.state_flats().items():
        mean = before[name].mean(0)
        assert torch.equal(flat[0], flat[1])
        assert ((flat[0] - mean).abs() <= 0.0079 * mean.abs().max()).all()


def test_an_undone_state_is_brought_back_bit_for_bit() -> None:
    params, optimizer = trained("adamw", steps=2)
    tensors, others = whole_state(optimizer)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    run(optimizer, params, range(2, 4))
    for _, now, then in state_pairs(optimizer, kept):
        now.copy_(then)
    reset_others(optimizer, kept, others)
    assert kept.keys() >= {"0/exp_avg", "0/exp_avg_scale", "0/exp_avg_sq_scale", "0/step"}
    for name, flat in optimizer.all_state_flats().items():
        assert torch.equal(flat, kept[name])


def test_every_rule_is_tested() -> None:
    assert {FUSED[name][0] for name in NAMES} == {ours for ours, _ in FUSED.values()}


#: By size of the gradients of a block beside one that is 1: bounds of the second moment's error, as a root of the mean
#: of squares, and of the share by which steps are too large on average. A little above what the documentation says.
TABLE = {1.0: (0.10, 0.007), 0.1: (0.19, 0.015), 0.01: (0.36, 0.045), 0.001: (0.66, 0.145)}
BLOCKS, WARM, STEPS = 16, 2000, 3000


def observed(state_dtype: Any, mean: float, spread: float) -> tuple[Tensor, Tensor]:
    """Return the mean step of every neighbour, and some of its second moments, [size, …, neighbour]."""
    sizes = torch.tensor(list(TABLE)).repeat_interleave(BLOCKS).view(-1, 1).repeat(1, BLOCK)
    sizes[:, 0] = 1
    param = torch.nn.Parameter(torch.zeros(sizes.numel()))
    optimizer = hk.FusedAdamW([param], lr=1.0, weight_decay=0.0, state_dtype=state_dtype)
    generator, steps, moments = torch.Generator().manual_seed(0), torch.zeros(sizes.shape).double(), []
    for number in range(STEPS):
        param.grad = (torch.randn(sizes.shape, generator=generator).mul_(spread).add_(mean) * sizes).view(-1)
        optimizer.step()
        with torch.no_grad():
            steps += -param.view(sizes.shape) if number >= WARM else 0
            param.zero_()
        if number >= WARM and number % 200 == 0:
            state = hk.optim.decoded_state_dict(optimizer.state_dict())["state"][0]
            moments.append(state["exp_avg_sq"].view(sizes.shape).clone())
    seen = torch.stack(moments)[:, :, 1:].unflatten(1, (len(TABLE), BLOCKS)).transpose(0, 1)
    return steps[:, 1:].unflatten(0, (len(TABLE), BLOCKS)), seen


@pytest.mark.full
@pytest.mark.parametrize(("mean", "spread"), [(1.0, 0.5), (0.1, 1.0)], ids=["steady", "noisy"])
def test_errors_are_those_of_the_table(mean: float, spread: float) -> None:
    (steps, moments), (expected, exact) = (observed(kind, mean, spread) for kind in ("int8", torch.float32))
    for number, (size, (most, too_large)) in enumerate(TABLE.items()):
        error = moments[number] / exact[number] - 1
        assert abs(float(error.mean())) < 0.02, f"{size}: correct on average"
        assert most / 2 < float(error.square().mean().sqrt()) < most, size
        assert -0.001 < float(steps[number].mean() / expected[number].mean()) - 1 < too_large, size
