"""ReplicaStack: the tensors that get rows, modules that are refused, state and copies, and its place among processes.

Arguments of the wrong kind are in ``tests/bad_input``.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from hdet_kernels.stack import StackedParameter
from tests.ranks import run_ranks
from tests.stack.cases import MixedModel, R, loss_of, mixed_model, number_rows


def test_trainable_parameters_and_buffers_get_rows() -> None:
    module = mixed_model()
    stack = hk.ReplicaStack(module, R)
    own = dict(module.named_parameters())
    assert [name for name, _ in stack.named_parameters()] == ["inner.weight", "inner.bias", "norm.weight", "norm.bias"]
    assert len(list(stack.parameters())) == 4, "tied parameters are one, frozen ones are shared"
    for name, parameter in stack.named_parameters():
        assert isinstance(parameter, StackedParameter)
        assert (parameter.replicas, parameter.shares_gradient, parameter.requires_grad) == (R, True, True)
        assert torch.equal(parameter, own[name].expand(R, *own[name].shape))
        assert parameter[0].stride() == own[name].stride()
    buffers = dict(module.named_buffers())
    assert {name for name, _ in stack.named_buffers()} == buffers.keys()
    for name, buffer in stack.named_buffers():
        assert torch.equal(buffer, buffers[name].expand(R, *buffers[name].shape))
    assert (stack.ensemble.size, stack.ensemble.rows, stack.ensemble.replica) == (R, R, 0)
    assert isinstance(stack.ensemble, RowEnsemble)
    assert "3 × MixedModel of" in repr(stack)


# The module that the stack was made of, which is not trained


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def _step(stack: hk.ReplicaStack, optimizer: torch.optim.Optimizer) -> None:
    stack.backward(lambda model, x: model(x).square().mean(), torch.ones(2 * stack.replicas, 3))
    optimizer.step()
    optimizer.zero_grad()


def _trained(module: nn.Module, replicas: int = 2) -> hk.ReplicaStack:
    stack = hk.ReplicaStack(module, replicas)
    _step(stack, hk.FusedSGD(stack.parameters(), lr=0.1))
    return stack


def _put_back(module: nn.Module, stack: hk.ReplicaStack) -> None:
    module.load_state_dict(stack.module().state_dict())
    module(torch.ones(3))


#: What may be done with the module, and how often that warns.
USES: dict[str, tuple[Callable[[nn.Module, hk.ReplicaStack], object], int]] = {
    "called": (lambda module, stack: [module(torch.ones(3)), module(torch.ones(3))], 1),
    "saved": (lambda module, stack: [module.state_dict(), module(torch.ones(3))], 1),
    "a part is saved": (lambda module, stack: nn.Sequential(module).state_dict(), 1),
    # A message in the middle would break the graph.
    "compiled": (lambda module, stack: torch.compile(module, backend="eager", fullgraph=True)(torch.ones(3)), 0),
    "traced": (lambda module, stack: torch.jit.trace(module, torch.ones(3))(torch.ones(3)), 1),
    "copied": (lambda module, stack: copy.deepcopy(module)(torch.ones(3)), 0),
    "a copy is compiled": (
        lambda module, stack: torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True)(torch.ones(3)),
        0,
    ),
    "pickled": (lambda module, stack: pickle.loads(pickle.dumps(module)).state_dict(), 0),
    "the trained one is used": (lambda module, stack: [stack.module()(torch.ones(3)), stack.module().state_dict()], 0),
    "a replica is used": (lambda module, stack: [stack.replica(1)(torch.ones(3)), stack.replica(0).state_dict()], 0),
    "trained values are put into it": (_put_back, 0),
    "rows are put into it for a call": (
        lambda module, stack: torch.func.functional_call(
            module, {name: rows[0] for name, rows in stack.named_parameters()}, torch.ones(3)
        ),
        0,
    ),
    "the stack is used": (
        lambda module, stack: [
            stack.losses(lambda model, x: model(x).sum(), torch.ones(4, 3)),
            stack.losses(lambda model, x: model(x).sum(), torch.ones(4, 3), chunk_size=1),
            stack.load_state_dict(stack.state_dict()),
            _step(stack, hk.FusedSGD(stack.parameters(), lr=0.1)),
        ],
        0,
    ),
}


@pytest.mark.parametrize("use", [pytest.param(u, marks=[pytest.mark.full] * ("compiled" in u)) for u in USES])
def test_using_the_module_itself_after_a_step_warns_once_and_names_the_trained_one(
    use: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Layer(3, 3)
    stack = _trained(module)
    act, warnings = USES[use]
    act(module, stack)
    own = [record.getMessage() for record in caplog.records if record.name == "hdet_kernels"]
    assert [message.count("Use stack.module()") for message in own] == [1] * warnings


def test_before_the_first_step_the_module_is_that_of_all_replicas(caplog: pytest.LogCaptureFixture) -> None:
    module = Layer(3, 3)
    stack = hk.ReplicaStack(module, 2)
    stack.backward(lambda model, x: model(x).square().mean(), torch.ones(4, 3))
    module(torch.ones(3))
    module.state_dict()
    assert not caplog.messages


def test_the_module_does_not_keep_the_stack_alive_and_copies_of_the_stack_have_no_hooks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Layer(3, 3)
    stack = _trained(module)
    copied, found = stack.module(), weakref.ref(stack)
    assert not copied._forward_pre_hooks
    assert not copied._state_dict_pre_hooks
    del stack
    gc.collect()
    assert found() is None
    assert not module._forward_pre_hooks
    module(torch.ones(3))
    assert not caplog.messages


def test_rows_have_the_memory_format_of_the_parameter() -> None:
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    weight = next(iter(hk.ReplicaStack(module, R).parameters()))
    assert weight[1].is_contiguous(memory_format=torch.channels_last)
    assert weight.stride() == (54, *module.weight.stride())


def test_parameters_that_share_their_memory_are_tied() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = nn.Parameter(module["a"].weight.data)
    module["a"].weight.requires_grad_(False)  # trained under one of its names
    stack = hk.ReplicaStack(module, R)
    assert [name for name, _ in stack.named_parameters()] == ["a.weight", "a.bias", "b.bias"]
    stack.backward(lambda m, x: m["b"](m["a"](x)).square().mean(), torch.ones(R, 3))
    reference = stack.replica(0).requires_grad_()
    loss = reference["b"](reference["a"](torch.ones(1, 3))).square().mean()  # type: ignore[index]
    both = [p for n, p in reference.named_parameters() if n.endswith("weight")]
    gradients = torch.autograd.grad(loss, both)
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], gradients[0] + gradients[1])


def test_empty_tensors_are_not_tied() -> None:
    module = nn.Linear(2, 1)
    for name in ("one", "two"):
        module.register_buffer(name, torch.zeros(0))
    assert [name for name, _ in hk.ReplicaStack(module, R).named_buffers()] == ["one", "two"]


def test_copies_and_pickles_of_a_parameter_are_stacked_parameters() -> None:
    parameter = StackedParameter(torch.randn(R, 2), shares_gradient=False)
    for made in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(made, StackedParameter)
        assert (made.replicas, made.shares_gradient, made.requires_grad) == (R, False, True)
        assert torch.equal(made, parameter)
    assert type(parameter * 2) is Tensor


def overlapping() -> nn.Module:
    module = nn.Module()
    memory = torch.zeros(6)
    module.a, module.b = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    return module


def transposed() -> nn.Module:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2, 3))
    module.b = nn.Parameter(module.a.data.t())
    return module


def aliased() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", module.weight.data)
    return module


def expanded() -> nn.Module:
    module = nn.Module()
    module.p = nn.Parameter(torch.zeros(1).expand(3))
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Linear(1, 1).requires_grad_(False), "nothing to train"),
        (lambda: nn.LazyLinear(2), "weight is not initialised yet: run a forward pass"),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), "1.weight is on the meta"),
        (expanded, "elements share memory"),
        (overlapping, "share a part of their memory"),
        (transposed, "share their memory but differ in shape or strides"),
        (aliased, "buffer seen shares its memory with parameter weight"),
    ],
    ids=["frozen", "lazy", "partly-meta", "expanded", "overlap", "transposed", "aliased"],
)
def test_modules_that_cannot_be_stacked_are_refused(module: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hk.ReplicaStack(module(), R)


def test_wrapped_and_sharded_modules_are_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert "pass ddp.module" in messages[0]
        assert "0 is wrapped in DistributedDataParallel" in messages[1]
        assert "weight is a sharded parameter (DTensor" in messages[2]


def _refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    messages = []
    for module in (ddp, nn.Sequential(ddp), sharded):
        with pytest.raises(TypeError) as caught:
            hk.ReplicaStack(module, 2)
        messages.append(str(caught.value))
    return messages


def test_the_module_is_not_changed() -> None:
    module = mixed_model()
    before = copy.deepcopy(module.state_dict())
    stack = hk.ReplicaStack(module, R)
    stack.backward(lambda m, x: m(x), torch.randn(4 * R, 4))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_torch_optimizers_train_the_rows(gradients: Any) -> None:
    """A torch optimizer moves every row by its own gradient, or by the shared one."""
    stack = number_rows(hk.ReplicaStack(nn.Linear(2, 1), R, gradients=gradients))
    before = [p.detach().clone() for p in stack.parameters()]
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    stack.backward(loss_of, torch.randn(R, 2))
    optimizer.step()
    for parameter, was in zip(stack.parameters(), before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), was - 0.1 * parameter.grad)


def test_a_replica_is_a_plain_module() -> None:
    stack = number_rows(hk.ReplicaStack(mixed_model(), R))
    for r in (0, 2, -1):
        made = stack.replica(r)
        assert type(made) is MixedModel
        assert made.outer.weight is made.inner.weight, "still tied"
        named = dict(made.named_parameters())
        for name, parameter in stack.named_parameters():
            assert torch.equal(named[name], parameter[r])
            assert named[name].data_ptr() != parameter[r].data_ptr()
        assert torch.equal(made.norm.running_mean, dict(stack.named_buffers())["norm.running_mean"][r])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_module_with_computed_tensors_as_attributes_is_copied() -> None:
    module = nn.utils.weight_norm(nn.Linear(4, 2))
    assert not module.weight.is_leaf
    stack = number_rows(hk.ReplicaStack(module, R))
    x = torch.randn(R, 4)
    losses = stack.losses(loss_of, x)
    for r in range(R):
        torch.testing.assert_close(losses[r], loss_of(stack.replica(r), x[r : r + 1]).detach())


def test_the_mean_of_equal_replicas_equals_each_of_them() -> None:
    module = mixed_model()
    made = hk.ReplicaStack(module, 7).module().state_dict()
    assert all(torch.equal(value, made[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("where", "value"), [("inner.bias", torch.nan), ("norm.running_var", torch.inf), ("mask", torch.inf)]
)
def test_the_mean_leaves_out_non_finite_replicas(where: str, value: float) -> None:
    """Buffers may be non-finite where those of the module are, as the mask is from the start."""
    module = mixed_model()
    stack = number_rows(hk.ReplicaStack(module, R))
    tensors = {**dict(stack.named_parameters()), **dict(stack.named_buffers())}
    with torch.no_grad():
        tensors[where][1].view(-1)[0] = value
        tensors["norm.num_batches_tracked"].copy_(torch.tensor([4, 5, 6]))
    made = stack.module()
    torch.testing.assert_close(made.inner.weight, module.inner.weight + 1, msg="(0 + 2) / 2")
    torch.testing.assert_close(made.norm.running_mean, module.norm.running_mean + 1)
    assert made.norm.num_batches_tracked == 4, "integers have no mean"
    assert torch.equal(made.mask.isinf(), module.mask.isinf())
    with torch.no_grad():
        tensors[where].flatten(1)[:, 0] = value
    with pytest.raises(RuntimeError, match="no replica is finite"):
        stack.module()


def test_state_survives_saving_and_loading() -> None:
    stack = number_rows(hk.ReplicaStack(mixed_model(), R))
    state = stack.state_dict()
    assert state.keys() == mixed_model().state_dict().keys()
    assert state["inner.weight"].shape == (R, 4, 4)
    assert state["frozen.weight"].shape == (4, 4), "frozen: one for all replicas"
    assert state["norm.num_batches_tracked"].shape == (R,)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = hk.ReplicaStack(MixedModel(), R)
    addresses = [p.data_ptr() for p in other.parameters()]
    result = other.load_state_dict(torch.load(file, weights_only=True))
    assert str(result) == str(nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1).state_dict())), "torch's own result"
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert addresses == [p.data_ptr() for p in other.parameters()], "in place"


def test_entries_renamed_by_a_state_dict_hook_have_rows() -> None:
    """The entries hold the rows of the replicas, not the tensors of the template."""

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        return {f"inner.{name}": value for name, value in state.items()}

    module = nn.Linear(3, 2)
    module._register_state_dict_hook(renamed)
    stack = number_rows(hk.ReplicaStack(module, 2))
    saved = copy.deepcopy(stack.state_dict())
    for name, parameter in stack.named_parameters():
        assert torch.equal(saved[f"inner.{name}"], parameter)
    again = hk.ReplicaStack(module, 2)
    again.load_state_dict(saved)
    assert all(map(torch.equal, again.parameters(), stack.parameters()))


def test_the_state_of_a_plain_module_goes_to_all_rows() -> None:
    plain = mixed_model()
    stack = number_rows(hk.ReplicaStack(MixedModel(), R))
    stack.load_state_dict(plain.state_dict())
    for r in range(R):
        assert all(torch.equal(v, plain.state_dict()[n]) for n, v in stack.replica(r).state_dict().items())


def test_states_that_do_not_fit_change_nothing() -> None:
    stack = hk.ReplicaStack(mixed_model(), R)
    before = copy.deepcopy(stack.state_dict())
    good = hk.ReplicaStack(MixedModel(), R).state_dict()
    missing = {name: value for name, value in good.items() if name != "inner.bias"}
    cases: list[tuple[dict[str, Any], str]] = [
        (missing, "missing: inner.bias"),
        ({**good, "more": torch.zeros(1)}, "unexpected: more"),
        ({**good, "inner.bias": torch.zeros(2, 4)}, r"inner.bias is \(2, 4\), expected \(3, 4\) or \(4,\)"),
        ({**good, "frozen.bias": torch.zeros(3, 4)}, r"frozen.bias is \(3, 4\), expected \(4,\)"),
        ({**good, "inner.bias": None}, "inner.bias is NoneType"),
    ]
    for state, message in cases:
        with pytest.raises(RuntimeError, match=message):
            stack.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())
    result = stack.load_state_dict({**missing, "more": torch.zeros(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["inner.bias"], ["more"])
    assert torch.equal(stack.state_dict()["inner.weight"], good["inner.weight"])


def test_extra_state_belongs_to_the_module() -> None:
    class Counting(nn.Linear):
        count = 3

        def get_extra_state(self) -> Any:
            return self.count

        def set_extra_state(self, state: Any) -> None:
            self.count = state

    state = hk.ReplicaStack(nn.Sequential(Counting(1, 1)), R).state_dict()
    assert state["0._extra_state"] == 3
    module = nn.Sequential(Counting(1, 1))
    hk.ReplicaStack(module, R).load_state_dict({**state, "0._extra_state": 8})
    assert module[0].count == 8


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    return model


def _begin(rank: int) -> tuple[list[Tensor], list[int]]:
    """Return the initial values of a rank, and what its ensemble is."""
    stack = hk.ReplicaStack(model := model_of(rank), 2, gradients="local")
    tensors = [tensor.detach().clone() for tensor in (*stack.parameters(), *stack.buffers(), model[0].bias)]
    stack.backward(loss_of, torch.randn(4, 3))
    rows = {len(p.grad) for p in stack.parameters() if p.grad is not None}
    return tensors, [stack.ensemble.size, stack.ensemble.replica, *rows]


def test_all_processes_begin_with_the_values_of_the_first() -> None:
    """The default ensemble is the process group."""
    model = model_of(0)
    bias = model[0].bias
    expected = [*(p for p in model.parameters() if p is not bias), *model.buffers()]
    for rank, ((*stacked, frozen), place) in enumerate(run_ranks(2, _begin)):
        assert place == [4, 2 * rank, 2]
        assert torch.equal(frozen, bias)
        for found, own in zip(stacked, expected, strict=True):
            assert torch.equal(found, own.expand_as(found))


def _differing_stacks(rank: int) -> list[str]:
    messages = []
    for outputs, replicas in ((4, 2 + rank), (4 + rank, 2)):
        with pytest.raises(RuntimeError) as raised:
            hk.ReplicaStack(nn.Linear(3, outputs), replicas)
        messages.append(str(raised.value))
    return messages


def test_processes_must_build_the_same_stack() -> None:
    for replicas, module in run_ranks(2, _differing_stacks):
        assert re.search(r"disagree on the stack \(rank 0: replicas 2; rank 1: replicas 3\)", replicas)
        assert re.search(r"\(rank 0: .*weight float32 \(4, 3\).* rank 1: .*weight float32 \(5, 3\)", module)


def test_cuda_graphs_change_nothing_on_a_cpu() -> None:
    x = torch.randn(R, 2)
    plain, recorded = (hk.ReplicaStack(nn.Linear(2, 1), R, cuda_graphs=cuda_graphs) for cuda_graphs in (False, True))
    recorded.load_state_dict(plain.state_dict())
    for _ in range(4):
        assert torch.equal(plain.backward(loss_of, x), recorded.backward(loss_of, x))
