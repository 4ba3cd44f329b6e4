"""The checks of a Lightning run that need no Lightning; ``test_lightning.py`` has those of its own classes."""

from __future__ import annotations

import pytest

from hdet_kernels.integrations.lightning_checks import check_strategy, checked_schedulers


def test_a_strategy_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="object is not known to give every process one whole replica"):
        check_strategy(object())


def test_no_scheduler_at_all() -> None:
    """``test_lightning.py`` has schedulers that are found, or refused."""
    with pytest.raises(ValueError, match="configure_optimizers returned: none"):
        checked_schedulers([], automatic=True)
