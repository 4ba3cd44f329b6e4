"""Every saver saves and loads every tensor of every kind of model that a fused optimizer trains."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import hdet_kernels as hk
from tests.training import same

# Both warn that there is one process only.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Net(nn.Module):
    """A model with tied weights, a BatchNorm with buffers, a frozen, an empty and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.hidden(self.embed(tokens))) * self.scale + self.nothing.sum())
        return self.head(hidden)  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions in ``channels_last``."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7)
        self.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        images = torch.sin(torch.arange(6 * 3 * 16.0)).view(6, 3, 4, 4) * tokens.view(6, 1, 1, 1)
        return self.norm(self.convolution(images)).mean(dim=(2, 3))  # type: ignore[no-any-return]


def gpt2() -> Any:
    """Return a language model with tied embeddings, as transformers builds it from a configuration."""
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 7, "n_positions": 8}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends, attn_pdrop=0.0, resid_pdrop=0.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Net,
    "masters": lambda: Net().to(torch.bfloat16),
    "channels last": Images,
    "gpt2": gpt2,
    "int8": Net,
    "split, int8": lambda: Net().to(torch.bfloat16),
    "rounded, int8": lambda: Net().to(torch.bfloat16),
    "muon, split": lambda: Net().to(torch.bfloat16),
    "in the backward pass": lambda: Net().to(torch.bfloat16),
}

#: Of the kinds of models, those that are not trained by ``FusedAdamW`` with its defaults.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "int8": partial(hk.FusedAdamW, state_dtype="int8"),
    "split, int8": partial(hk.FusedAdamW, master_weights="split", state_dtype="int8"),
    "rounded, int8": partial(hk.FusedAdamW, stochastic_rounding=True, state_dtype="int8"),
    "muon, split": partial(hk.FusedMuon, normuon=True, master_weights="split"),
    "in the backward pass": partial(hk.FusedAdamW, max_grad_norm=0.1, in_backward=hk.InBackward("previous", None, 30)),
}

Pair = tuple[nn.Module, torch.optim.Optimizer]


def trained(kind: str, steps: int) -> Pair:
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, steps)
    return model, optimizer


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS.get(kind, hk.FusedAdamW)(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)  # of the dropout
        tokens = (torch.arange(6) + step) % 7
        output = model(tokens[None]) if hasattr(model, "generate") else model(tokens)
        logits = output if isinstance(output, Tensor) else output.logits[0]
        F.cross_entropy(logits.float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


# Savers. Each saves the first pair and loads into the second, and returns whether the optimizer is in it too.


def torch_state(pair: Pair, other: Pair, folder: Path) -> bool:
    torch.save([part.state_dict() for part in pair], folder / "states.pt")
    for part, state in zip(other, torch.load(folder / "states.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    return True


def torch_model(pair: Pair, other: Pair, folder: Path) -> bool:
    torch.save(pair[0], folder / "model.pt")
    other[0].load_state_dict(torch.load(folder / "model.pt", weights_only=False).state_dict())
    return False


def safetensors_model(pair: Pair, other: Pair, folder: Path) -> bool:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(pair[0], str(folder / "model"))
    names = {tensor.data_ptr() for tensor in pair[0].state_dict().values() if tensor.numel()}
    empty = [tensor for tensor in pair[0].state_dict().values() if not tensor.numel()]
    assert len(safetensors.load_file(folder / "model")) == len(names) + len(empty), "tied weights once, all others"
    assert safetensors.load_model(other[0], str(folder / "model")) == (set(), [])
    return False


def safetensors_file(pair: Pair, other: Pair, folder: Path) -> bool:
    safetensors = pytest.importorskip("safetensors.torch")
    # It takes neither tied weights nor channels_last, of any model.
    tied = ("head.weight", "lm_head.weight")
    own = {name: t.contiguous() for name, t in pair[0].state_dict().items() if name not in tied}
    safetensors.save_file(own, folder / "model")
    missing, unknown = other[0].load_state_dict(safetensors.load_file(folder / "model"), strict=False)
    assert set(missing) <= set(tied)
    assert not unknown
    return False


def safetensors_state(pair: Pair, other: Pair, folder: Path) -> bool:
    """Keep model and optimizer in safetensors, and only the groups elsewhere."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors_model(pair, other, folder)
    saved = pair[1].state_dict()
    state = {f"{key}/{name}": value for key, entry in saved["state"].items() for name, value in entry.items()}
    safetensors.save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "state")
    loaded: dict[int, dict[str, Tensor]] = {}
    for name, tensor in safetensors.load_file(folder / "state").items():
        key, entry = name.split("/")
        loaded.setdefault(int(key), {})[entry] = tensor
    other[1].load_state_dict({"state": loaded, "param_groups": saved["param_groups"]})
    return True


def distributed(pair: Pair, other: Pair, folder: Path) -> bool:
    dcp.save(dict(zip("mo", get_state_dict(*pair), strict=True)), checkpoint_id=folder)
    state = dict(zip("mo", get_state_dict(*other), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*other, model_state_dict=state["m"], optim_state_dict=state["o"])
    return True


def accelerate_model(pair: Pair, other: Pair, folder: Path) -> bool:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(pair[0], str(folder))
    accelerate.load_checkpoint_in_model(other[0], str(folder))
    return False


def accelerate_state(pair: Pair, other: Pair, folder: Path) -> bool:
    accelerate = pytest.importorskip("accelerate")
    for part, verb in ((pair, "save_state"), (other, "load_state")):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(*part)
        getattr(accelerator, verb)(str(folder))
    return True


def pretrained(pair: Pair, other: Pair, folder: Path) -> bool:
    model: Any = pair[0]
    model.save_pretrained(folder)
    other[0].load_state_dict(type(model).from_pretrained(folder).state_dict())
    return False


def lightning(pair: Pair, other: Pair, folder: Path) -> bool:
    library = pytest.importorskip("lightning.pytorch")

    class Module(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module, optimizer: Any) -> None:
            super().__init__()
            self.model, self.own = model, optimizer
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return self.own

        def training_step(self, *_: Any) -> None:
            self.optimizers().optimizer.zero_grad()

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {**quiet, "max_epochs": 1, "enable_checkpointing": False, "default_root_dir": folder}
    batches = torch.utils.data.DataLoader([0])
    trainer = library.Trainer(**settings)
    trainer.fit(Module(*pair), batches)
    trainer.save_checkpoint(folder / "all.ckpt")
    library.Trainer(**settings).fit(Module(*other), batches, ckpt_path=folder / "all.ckpt", weights_only=False)
    return True


SAVERS = (
    *(torch_state, torch_model, safetensors_model, safetensors_file, safetensors_state, distributed),
    *(accelerate_model, accelerate_state, pretrained, lightning),
)

#: What saves the state of an optimizer in a way of its own, and in less than seconds.
QUICK = (torch_state, safetensors_state, distributed)
OF_QUICK = ("split, int8", "in the backward pass")


def slow(saver: Callable[..., bool], kind: str) -> bool:
    """Whether a case is left to ``make test-full``: one saver takes all kinds of models, and one kind all savers."""
    if saver is lightning:  # which takes seconds to import
        return True
    return not (saver in (torch_state, pretrained) or kind == "tied" or (kind in OF_QUICK and saver in QUICK))


def cases() -> list[Any]:
    """Return every saver with every kind of model that it takes."""
    return [
        pytest.param(saver, kind, id=f"{saver.__name__}-{kind}", marks=pytest.mark.full if slow(saver, kind) else [])
        for saver in SAVERS
        for kind in MODELS
        if (saver is not pretrained or kind == "gpt2") and (saver is not safetensors_state or kind != "channels last")
    ]


@pytest.mark.parametrize(("saver", "kind"), cases())
def test_every_tensor_is_saved_and_loaded(saver: Callable[[Pair, Pair, Path], bool], kind: str, tmp_path: Path) -> None:
    pair, other = trained(kind, 2), trained(kind, 0)
    assert not same(pair[0].state_dict(), other[0].state_dict())
    before = [tensor.stride() for tensor in other[0].state_dict().values()]
    with_optimizer = saver(pair, other, tmp_path)
    assert same(pair[0].state_dict(), other[0].state_dict())
    assert [tensor.stride() for tensor in other[0].state_dict().values()] == before
    if with_optimizer:
        assert same(pair[1].state_dict()["state"], other[1].state_dict()["state"])
    else:  # both begin anew with what they have
        pair, other = ((model, make_optimizer(kind, model)) for model, _ in (pair, other))
    for each in (pair, other):
        train(*each, 2)
    assert same(pair[0].state_dict(), other[0].state_dict())


# Files of parts, and their sizes

#: A value that only one parameter has, to be looked for in files.
MARK = 123456.789

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_a_part_of_a_model_is_saved_without_the_rest(gradients: Any, device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(512, 512)).to(device)
    optimizer = hk.FusedAdamW(model.parameters(), gradients=gradients)
    with torch.no_grad():
        model[1].weight.fill_(MARK)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    mark = model[1].weight.detach()[0, 0].cpu().numpy().tobytes()
    first = list(model[0].parameters())
    parts = {
        "a module": model[0],
        "its state_dict": model[0].state_dict(),
        "a parameter": first[0],
        "state": [optimizer.state[param] for param in first],
        "gradients": [param.grad for param in first],
    }
    for what, part in parts.items():
        written = saved(part)
        assert len(written) < 10_000, what
        assert mark not in written, what
    assert mark in saved(model)


def test_the_file_of_a_whole_model_is_as_large_as_its_tensors() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    plain, before = copy.deepcopy(model), len(saved(model.state_dict()))
    optimizer = hk.FusedAdamW(model.parameters())
    assert len(saved(model.state_dict())) == before
    usual = torch.optim.AdamW(plain.parameters())
    for each in (model, plain):
        each(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    usual.step()
    assert len(saved(optimizer.state_dict())) < 1.01 * len(saved(usual.state_dict()))


def test_tied_parameters_stay_tied_through_a_file() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    twin = nn.Parameter(weight.data)  # another object on the same memory
    hk.FusedAdamW([weight, nn.Parameter(torch.ones(2)), twin])
    assert twin.data_ptr() == weight.data_ptr()
    loaded = torch.load(io.BytesIO(saved([weight, twin])), weights_only=True)
    assert loaded[0].data_ptr() == loaded[1].data_ptr()


def test_a_stack_and_its_optimizer_are_saved_without_gaps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 256))
    stack = hk.ReplicaStack(model, 3, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters())
    for param in stack.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    first = next(stack.parameters())
    assert len(saved(stack.state_dict()["0.weight"])) < 10_000
    assert len(saved(first)) < 10_000
    state = optimizer.state_dict()["state"]
    assert len(saved(state[0])) < 10_000
    assert torch.equal(state[0]["exp_avg"], optimizer.state[first]["exp_avg"])
    tensors = [tensor for tensor in stack.state_dict().values() if isinstance(tensor, Tensor)]
    tensors += [tensor for entry in state.values() for tensor in entry.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    optimizer.state[first]["exp_avg"].fill_(MARK)
    assert (optimizer.state_flats()["0/exp_avg"] == MARK).sum() == first.numel(), "the state itself is in the buffer"
