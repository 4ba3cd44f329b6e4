"""The parts of Lightning's probe that need no Lightning; ``test_lightning.py`` has runs with each kind of probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.integrations.lightning_probe import call_step, loss_of, unnoticed


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda batch: [batch], ["b"]),
        (lambda batch, batch_idx: [batch, batch_idx], ["b", 0]),
        (lambda x, batch_idx, dataloader_idx=7: [x, batch_idx, dataloader_idx], ["b", 0, 0]),
    ],
    ids=["batch", "index", "two-indices"],
)
def test_a_step_gets_the_indices_that_it_takes(step: Callable[..., Any], expected: list[object]) -> None:
    assert call_step(step, "b") == expected


@pytest.mark.parametrize(
    ("output", "loss"),
    [(torch.tensor(3.0), 3.0), ({"loss": torch.tensor(2.0), "n": 1}, 2.0), (None, None), ({"n": 1}, None)],
    ids=["tensor", "dict", "nothing", "dict-without"],
)
def test_the_loss_of_an_output(output: Any, loss: float | None) -> None:
    found = loss_of(output)
    assert (found.item() if isinstance(found, Tensor) else found) == loss


def test_nothing_is_logged_inside_the_block() -> None:
    class Logging(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.logged: list[str] = []

        def log(self, name: str) -> None:
            self.logged.append(name)

    module = Logging()
    with unnoticed(module):
        module.log("inside")
    module.log("outside")
    replaced: list[str] = []
    module.log = replaced.append  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), unnoticed(module):
        raise ZeroDivisionError
    module.log("own")
    assert module.logged == ["outside"]
    assert replaced == ["own"]
