"""Set up the test session: Triton's interpreter without a GPU, and the two test runs.

``make test`` runs what is not marked ``full``; ``make test-full`` runs the rest. Whatever needs a GPU belongs to the
second, so that a machine without one prints the reason for each skip there. Triton's interpreter takes a second where
others take a millisecond: of the cases of one test function it runs the first in ``make test``, the others in
``make test-full``.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

# A shell starts background jobs with interrupts ignored, and processes inherit that: those of the tests that interrupt
# a demo or a benchmark would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, for this process and those that it starts: the tests run in as many processes as there are
# cores, and their tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# The same examples in every run: one that fails is not for whoever runs the tests next. New ones are drawn by
# `pytest --hypothesis-profile=default`.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# Triton and torch's compiler decide when they are first imported. The compiler would start one more process for each
# core, which imports torch, for one kernel of a test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed torch's global generator, so that no test depends on those that ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def restored_log_level() -> Iterator[None]:
    """For code that sets the level of the package's log, as scripts do."""
    logger = logging.getLogger("hdet_kernels")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreted: set[str] = set()
    for item in items:
        function = item.nodeid.split("[")[0]
        if "[triton-cpu" in item.nodeid or "-triton-cpu" in item.nodeid:
            if function in interpreted:
                item.add_marker(pytest.mark.full)
            elif item.get_closest_marker("full") is None:
                interpreted.add(function)
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.full)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give every file to one worker, and the integrations too: a server imports their libraries for seconds."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/integrations" if file.startswith("tests/integrations/") else file

    return ByFile(config, log)
