"""Set up the test session: Triton's interpreter without a GPU, and the two test runs.

``make test`` runs what is not marked ``full``; ``make test-full`` runs the rest. Whatever needs a GPU belongs to the
second, so that a machine without one prints the reason for each skip there.
"""

from __future__ import annotations

import os

# Before torch is imported, for this process and those that it starts: the tests run in as many processes as there are
# cores, and their tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Triton decides when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.full)
