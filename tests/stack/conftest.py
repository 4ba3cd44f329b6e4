"""Fixtures for the tests of stacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.stack.cases import Messages


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[Messages]:
    """A function that returns the messages that the package has logged so far."""
    with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
        yield lambda: caplog.messages
