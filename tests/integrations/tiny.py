"""A tiny language model, tokens to train it on, and a trainer's arguments, for the ranks of a gloo group."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, LENGTH = 64, 12


def model(kind: str = "gpt2", seed: int = 0) -> Any:
    """Return a GPT-2 (tied embeddings, dropout) or a Llama of 2 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens. They have different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - number % (LENGTH - 2) :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: str, **given: Any) -> Any:
    """Return arguments for a training on CPUs that reports to nobody and saves nothing."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "use_cpu": True,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
    }
    return TrainingArguments(folder, **{**defaults, **given})


def flat(module: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def of_all_ranks(vector: torch.Tensor) -> list[torch.Tensor]:
    """Return the vectors of all ranks."""
    gathered = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, vector)
    return gathered


@contextlib.contextmanager
def shared_folder(rank: int) -> Iterator[str]:
    """Make the variables that torchrun sets, and a folder that all ranks see and the first one removes."""
    size = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made)
    try:
        yield str(made[0])
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(str(made[0]), ignore_errors=True)
