"""ReplicaStack: what becomes of a module's tensors, and what is refused. Losses: test_stack_losses.py."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.ranks import run_ranks

R = 3


class Model(nn.Module):
    """A bit of everything: a frozen layer, a tied one, BatchNorm, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen, self.outer = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("scratch", torch.arange(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.frozen(self.inner(x)))).square().mean()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def numbered(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    """Row r of every floating tensor moved by r."""
    with torch.no_grad():
        for tensor in (*stack.parameters(), *stack.buffers()):
            if tensor.is_floating_point():
                tensor += torch.arange(float(stack.replicas)).view(-1, *[1] * (tensor.dim() - 1))
    return stack


# The tensors


def test_trainable_parameters_and_buffers_get_rows() -> None:
    module = model()
    stack = hk.ReplicaStack(module, R)
    own = dict(module.named_parameters())
    assert [name for name, _ in stack.named_parameters()] == ["inner.weight", "inner.bias", "norm.weight", "norm.bias"]
    assert len(list(stack.parameters())) == 4, "tied parameters are one, frozen ones are shared"
    for name, parameter in stack.named_parameters():
        assert isinstance(parameter, hk.StackedParameter)
        assert (parameter.replicas, parameter.shares_gradient, parameter.requires_grad) == (R, True, True)
        assert torch.equal(parameter, own[name].expand(R, *own[name].shape))
        assert parameter[0].stride() == own[name].stride()
    buffers = dict(module.named_buffers())
    assert {name for name, _ in stack.named_buffers()} == buffers.keys()
    for name, buffer in stack.named_buffers():
        assert torch.equal(buffer, buffers[name].expand(R, *buffers[name].shape))
    assert (stack.ensemble.size, stack.ensemble.rows, stack.ensemble.replica) == (R, R, 0)
    assert isinstance(stack.ensemble, RowEnsemble)
    assert "3 × Model of" in repr(stack)


def test_rows_lie_as_the_parameter_does() -> None:
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    weight = next(iter(hk.ReplicaStack(module, R).parameters()))
    assert weight[1].is_contiguous(memory_format=torch.channels_last)
    assert weight.stride() == (54, *module.weight.stride())


def test_parameters_that_share_their_memory_are_one() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = nn.Parameter(module["a"].weight.data)
    stack = hk.ReplicaStack(module, R)
    assert [name for name, _ in stack.named_parameters()] == ["a.weight", "a.bias", "b.bias"]
    stack.backward(lambda m, x: m["b"](m["a"](x)).square().mean(), torch.ones(R, 3))
    reference = stack.replica(0)
    loss = reference["b"](reference["a"](torch.ones(1, 3))).square().mean()  # type: ignore[index]
    both = [p for n, p in reference.named_parameters() if n.endswith("weight")]
    gradients = torch.autograd.grad(loss, both)
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], gradients[0] + gradients[1])


def test_the_module_is_left_as_it_was() -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())
    stack = hk.ReplicaStack(module, R)
    stack.backward(lambda m, x: m(x), torch.randn(4 * R, 4))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in module.parameters())


def test_a_stacked_parameter_is_copied_and_pickled_as_one() -> None:
    parameter = hk.StackedParameter(torch.randn(R, 2), shares_gradient=False)
    for made in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(made, hk.StackedParameter)
        assert isinstance(made, nn.Parameter)
        assert (made.replicas, made.shares_gradient, made.requires_grad) == (R, False, True)
        assert torch.equal(made, parameter)
    assert type(parameter * 2) is Tensor
    with pytest.raises(ValueError, match="without dimensions"):
        hk.StackedParameter(torch.zeros(()))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_torch_optimizers_train_the_rows(gradients: Any) -> None:
    """A torch optimizer moves every row by its own gradient, or by the one of all."""
    stack = numbered(hk.ReplicaStack(nn.Linear(2, 1), R, gradients=gradients))
    before = [p.detach().clone() for p in stack.parameters()]
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    stack.backward(loss_of, torch.randn(R, 2))
    optimizer.step()
    for parameter, was in zip(stack.parameters(), before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), was - 0.1 * parameter.grad)


# Copies


def test_a_replica_is_a_plain_module() -> None:
    stack = numbered(hk.ReplicaStack(model(), R))
    for r in (0, 2, -1):
        made = stack.replica(r)
        assert type(made) is Model
        assert made.outer.weight is made.inner.weight, "still tied"
        named = dict(made.named_parameters())
        for name, parameter in stack.named_parameters():
            assert torch.equal(named[name], parameter[r])
            assert named[name].data_ptr() != parameter[r].data_ptr()
        assert torch.equal(made.norm.running_mean, dict(stack.named_buffers())["norm.running_mean"][r])
    with pytest.raises(IndexError, match="replicas 0 to 2, got 3"):
        stack.replica(3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_module_that_keeps_computed_tensors_is_copied() -> None:
    module = nn.utils.weight_norm(nn.Linear(4, 2))
    assert not module.weight.is_leaf
    stack = numbered(hk.ReplicaStack(module, R))
    x = torch.randn(R, 4)
    losses = stack.losses(loss_of, x)
    for r in range(R):
        torch.testing.assert_close(losses[r], loss_of(stack.replica(r), x[r : r + 1]).detach())


def test_the_mean_of_equal_replicas_is_each_of_them() -> None:
    module = model()
    made = hk.ReplicaStack(module, 7).module().state_dict()
    assert all(torch.equal(value, made[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("where", "value"), [("inner.bias", torch.nan), ("norm.running_var", torch.inf)])
def test_the_mean_leaves_out_what_is_not_finite(where: str, value: float) -> None:
    module = model()
    stack = numbered(hk.ReplicaStack(module, R))
    tensors = {**dict(stack.named_parameters()), **dict(stack.named_buffers())}
    with torch.no_grad():
        tensors[where][1, 2] = value
        tensors["norm.num_batches_tracked"].copy_(torch.tensor([4, 5, 6]))
    made = stack.module()
    torch.testing.assert_close(made.inner.weight, module.inner.weight + 1, msg="(0 + 2) / 2")
    torch.testing.assert_close(made.norm.running_mean, module.norm.running_mean + 1)
    assert made.norm.num_batches_tracked == 4, "integers have no mean"
    assert torch.equal(made.mask.isinf(), module.mask.isinf())
    with torch.no_grad():
        tensors[where][:, 2] = value
    with pytest.raises(RuntimeError, match="no replica is sound"):
        stack.module()


# state_dict


def test_state_goes_and_comes_back() -> None:
    stack = numbered(hk.ReplicaStack(model(), R))
    state = stack.state_dict()
    assert state.keys() == model().state_dict().keys()
    assert state["inner.weight"].shape == (R, 4, 4)
    assert state["frozen.weight"].shape == (4, 4), "all replicas have this one"
    assert state["norm.num_batches_tracked"].shape == (R,)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = hk.ReplicaStack(Model(), R)
    addresses = [p.data_ptr() for p in other.parameters()]
    result = other.load_state_dict(torch.load(file, weights_only=True))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert addresses == [p.data_ptr() for p in other.parameters()], "in place"


def test_names_that_a_hook_of_the_module_gives() -> None:
    """What is saved under them is the replicas', not the module's own."""

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
        return {f"inner.{name}": value for name, value in state.items()}

    module = nn.Linear(3, 2)
    module._register_state_dict_hook(renamed)
    stack = hk.ReplicaStack(module, 2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_()
    saved = copy.deepcopy(stack.state_dict())
    for name, parameter in stack.named_parameters():
        assert torch.equal(saved[f"inner.{name}"], parameter)
    again = hk.ReplicaStack(module, 2)
    again.load_state_dict(saved)
    assert all(map(torch.equal, again.parameters(), stack.parameters()))


def test_a_plain_modules_state_goes_to_all_rows() -> None:
    plain = model()
    stack = numbered(hk.ReplicaStack(Model(), R))
    stack.load_state_dict(plain.state_dict())
    for r in range(R):
        assert all(torch.equal(v, plain.state_dict()[n]) for n, v in stack.replica(r).state_dict().items())


def test_states_that_do_not_fit_change_nothing() -> None:
    stack = hk.ReplicaStack(model(), R)
    before = copy.deepcopy(stack.state_dict())
    good = hk.ReplicaStack(Model(), R).state_dict()
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


# Hyperparameters of the loss


def scaled(stack: hk.ReplicaStack) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        assert stack.hyper["scale"].shape == ()
        return model(x).mean() * stack.hyper["scale"] + stack.hyper["offset"]

    return loss_fn


@pytest.mark.parametrize("chunk_size", [None, 2, 1])
def test_every_replica_has_its_own_value(chunk_size: int | None) -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), R, gradients="local")
    stack.hyper["scale"] = [1, 2, 4]
    stack.hyper.set("offset", 0.5)
    x = torch.ones(1, 2)
    plain = stack.replica(0)(x).mean().detach()
    losses = stack.backward(scaled(stack), x, same_batch=True, chunk_size=chunk_size)
    torch.testing.assert_close(losses, plain * torch.tensor([1.0, 2.0, 4.0]) + 0.5)
    bias = dict(stack.named_parameters())["bias"].grad
    assert bias is not None
    assert bias.flatten().tolist() == [1, 2, 4]
    stack.hyper["scale"] = torch.tensor([3.0, 3.0, 5.0], dtype=torch.float64)
    losses = stack.losses(scaled(stack), x, same_batch=True, chunk_size=chunk_size)
    torch.testing.assert_close(losses, plain * torch.tensor([3.0, 3.0, 5.0]) + 0.5)


def test_hyper_is_a_mapping() -> None:
    hyper = hk.ReplicaStack(nn.Linear(2, 1), R).hyper
    assert (len(hyper), list(hyper), "p" in hyper) == (0, [], False)
    hyper["p"] = 0.25
    assert (len(hyper), list(hyper), "p" in hyper, hyper["p"].tolist()) == (1, ["p"], True, [0.25] * R)
    assert hyper["p"].dtype == torch.float32
    given = torch.tensor([1.0, 2.0, 3.0])
    hyper["p"] = given
    given.zero_()
    assert hyper["p"].tolist() == [1, 2, 3], "a copy"
    with pytest.raises(KeyError, match=r"'q' is not a hyperparameter of this stack; it has \['p'\]"):
        hyper["q"]
    with pytest.raises(ValueError, match=r"one number or 3, one for each replica, got shape \(2,\)"):
        hyper["p"] = [1, 2]
    with pytest.raises(TypeError, match="takes numbers, got 'high'"):
        hyper["p"] = "high"  # type: ignore[assignment]
    assert hyper["p"].tolist() == [1, 2, 3]


def test_hyper_is_not_written_inside_of_a_loss() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), R)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        stack.hyper["p"] = 1.0
        return model(x).mean()

    with pytest.raises(RuntimeError, match="set inside of a loss function"):
        stack.losses(loss_fn, torch.ones(R, 2))
    stack.hyper["p"] = 1.0


# What is refused


@pytest.mark.parametrize("replicas", [0, -1, 2.0, True, "2", None])
def test_replicas_must_be_counted(replicas: Any) -> None:
    with pytest.raises(ValueError, match="replicas must be a whole number of at least 1"):
        hk.ReplicaStack(nn.Linear(1, 1), replicas)


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


def holding(parameter: Tensor) -> nn.Module:
    module = nn.Module()
    module.p = nn.Parameter(parameter)
    return module


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (lambda: torch.zeros(2), TypeError, "needs a torch.nn.Module, got a Tensor"),
        (nn.ReLU, ValueError, "ReLU has no parameters that require a gradient"),
        (lambda: nn.Linear(1, 1).requires_grad_(False), ValueError, "nothing to train"),
        (lambda: nn.LazyLinear(2), ValueError, "weight is not initialised yet: run a forward pass"),
        (lambda: nn.Linear(2, 2, device="meta"), ValueError, "on the meta device"),
        (lambda: holding(torch.zeros(2, dtype=torch.complex64)), TypeError, "p is of torch.complex64; only real"),
        (lambda: holding(torch.zeros(1).expand(3)), ValueError, "elements share memory"),
        (overlapping, ValueError, "share a part of their memory"),
        (transposed, ValueError, "share their memory and differ in shape or strides"),
        (aliased, ValueError, "buffer seen shares its memory with parameter weight"),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), ValueError, "1.weight is on the meta"),
    ],
    ids=[
        *("tensor", "none", "frozen", "lazy", "meta", "complex", "expanded", "overlap", "transposed", "aliased"),
        "partly-meta",
    ],
)
def test_modules_that_cannot_be_stacked(module: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hk.ReplicaStack(module(), R)


def test_other_arguments_that_are_refused() -> None:
    with pytest.raises(ValueError, match="gradients must be 'shared' or 'local', got 'mean'"):
        hk.ReplicaStack(nn.Linear(1, 1), R, gradients="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not over RowEnsemble"):
        hk.ReplicaStack(nn.Linear(1, 1), R, ensemble=RowEnsemble(2, SingleReplica()))


def test_wrapped_and_sharded_modules_are_refused() -> None:
    for messages in run_ranks(2, _wrapped):
        assert "pass ddp.module" in messages[0]
        assert "0 is wrapped in DistributedDataParallel" in messages[1]
        assert "weight is a sharded parameter (DTensor" in messages[2]


def _wrapped(rank: int) -> list[str]:
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


def _places(rank: int) -> tuple[int, int, list[int]]:
    stack = hk.ReplicaStack(nn.Linear(1, 1), 2, gradients="local")
    stack.backward(loss_of, torch.full((2, 1), float(rank + 1)))
    shapes = [len(p.grad) for p in stack.parameters() if p.grad is not None]
    return stack.ensemble.size, stack.ensemble.replica, shapes


def test_the_default_ensemble_is_the_process_group() -> None:
    assert run_ranks(2, _places) == [(4, 0, [2, 2]), (4, 2, [2, 2])]


def test_the_example_of_the_docstring() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 5), replicas=8)
    x, y = torch.randn(16, 3), torch.randint(0, 5, (16,))
    losses = stack.backward(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
    assert losses.shape == (8,)


def _begun(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    stack = hk.ReplicaStack(model, 2)
    return [tensor.detach().clone() for tensor in (*stack.parameters(), *stack.buffers(), model[0].bias)]


def test_all_processes_begin_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bias = model[0].bias
    bias.requires_grad_(False)
    expected = [*(p for p in model.parameters() if p is not bias), *model.buffers()]
    for *stacked, frozen in run_ranks(2, _begun):
        assert torch.equal(frozen, bias)
        for found, own in zip(stacked, expected, strict=True):
            assert torch.equal(found, own.expand_as(found))


def _unlike(rank: int, what: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        hk.ReplicaStack(nn.Linear(3, 4 + rank * (what == "module")), 2 + rank * (what == "replicas"))
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("replicas", r"disagree on the stack \(rank 0: replicas 2; rank 1: replicas 3\)"),
        ("module", r"disagree on the stack \(rank 0: .*weight float32 \(4, 3\).* rank 1: .*weight float32 \(5, 3\)"),
    ],
)
def test_processes_must_build_the_same_stack(what: str, message: str) -> None:
    for said in run_ranks(2, _unlike, what):
        assert re.search(message, said)
