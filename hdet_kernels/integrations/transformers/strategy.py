"""Which parallel setups of transformers' ``Trainer`` have replicas that can differ."""

from __future__ import annotations

from accelerate.state import AcceleratorState, is_initialized
from torch import nn
from transformers import TrainingArguments

_INSTEAD = "start one process for each GPU with torchrun, without it (plain data parallel), or write a loop of your own"


def check_replicas(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Raise if the processes of this training cannot hold parameters of their own.

    Args:
        args: the arguments of the trainer.
        model: the model, if it is known.

    Raises:
        ValueError: names the setup and the way out.
    """
    if (reason := _shared_by(args, model)) is not None:
        raise ValueError(f"HDET needs a whole replica of the model in every process, but {reason}: {_INSTEAD}")


def _shared_by(args: TrainingArguments, model: nn.Module | None) -> str | None:
    """Return why there are no replicas; None if there are."""
    # accelerate launch chooses by its own configuration, which is not in the arguments.
    kind = AcceleratorState().distributed_type.value if is_initialized() else ""
    if args.deepspeed or kind == "DEEPSPEED":
        return "DeepSpeed steps one optimizer for all processes"
    if args.fsdp or kind == "FSDP" or kind == "MEGATRON_LM":
        return "FSDP or Megatron shards one model over the processes"
    if args.n_gpu > 1:
        return f"one process drives {args.n_gpu} GPUs (DataParallel)"
    sizes = getattr(args, "parallelism_config", None)
    parts = [f"{name}={getattr(sizes, name, 1)}" for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size")]
    if any(not part.endswith("=1") for part in parts):
        return f"parallelism_config shards the model ({', '.join(parts)})"
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return "the model was loaded sharded (distributed_config=)"
    return None
