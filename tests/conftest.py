"""Without a GPU the Triton kernels are tested in Triton's interpreter. Triton decides when it is first imported.

Tests import the benchmarks as those import each other. Their folder is last on the path: some tests have their names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
