"""Without a GPU the Triton kernels are tested in Triton's interpreter. Triton decides when it is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
