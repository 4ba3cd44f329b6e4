"""Cases of several replicas as the rows of one buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK
from tests.ops.cases import (
    POISON,
    RULES,
    SENTINEL,
    Case,
    Precision,
    case_of,
)

# A whole chunk and odd ones, one at an address that allows no vectors, an empty slot and a single element.
SIZES = (CHUNK + 1, CHUNK + 9, 0, 1)


# The rules whose weight decay enters a state, where replicas with different decays cannot share it.
COUPLED = ("adam", "adagrad")


@dataclass
class Stack:
    """A :class:`Case` whose parameters and masters are [rows, n]."""

    case: Case

    def replica(self, row: int) -> Case:
        master = None if self.case.master is None else self.case.master[row]
        return replace(self.case, param=self.case.param[row], master=master, rows=1)


def lengthened(flat: Tensor | None, extra: int, value: float) -> Tensor | None:
    return None if flat is None else torch.nn.functional.pad(flat, (0, extra), value=value)


def alone(case: Case, row: int, extra: int = 0) -> Case:
    """Return replica ``row`` alone: the case with parameters of its own, and flats longer by ``extra`` elements."""
    param, master = (lengthened(flat, extra, SENTINEL) for flat in (case.param, case.master))
    for flat in (param, master):
        if flat is not None and row > 0:
            flat += (flat != SENTINEL) * (row / 16)
    assert param is not None
    states = [lengthened(state, extra, POISON) for state in case.states]
    gap = torch.nn.functional.pad(case.gap, (0, extra), value=True)
    return replace(case, param=param, states=states, master=master, gap=gap, steps=case.steps.clone())


def stacked(replicas: list[Case]) -> Stack:
    first = replicas[0]
    masters = [case.master for case in replicas if case.master is not None]
    states = [None if state is None else state.clone() for state in first.states]
    param = torch.stack([case.param for case in replicas])
    master = torch.stack(masters) if masters else None
    steps, rows = first.steps.clone(), len(replicas)
    return Stack(replace(first, param=param, master=master, states=states, steps=steps, rows=rows))


def replicas_of(
    name: str, precision: Precision, device: str, rows: int, extra: int = 0, sizes: tuple[int, ...] = SIZES
) -> list[Case]:
    case = case_of(name, sizes, precision, device)
    return [alone(case, row, extra) for row in range(rows)]


def rows_for(name: str, rows: int) -> list[dict[str, float]]:
    """Return the hyperparameters of each replica; those that act on the parameter differ."""
    rule, row = RULES[name]
    made = []
    for replica in range(rows):
        own = {"lr": row["lr"] * (1 + replica / 2), "eps": row.get("eps", 0.0) * 10**replica, "seed": 3.0 + replica}
        if "lr_decay" in row:
            own["lr_decay"] = row["lr_decay"] * (1 + replica)
        coupled = rule in COUPLED or bool(row.get("momentum"))
        own["weight_decay"] = 0.0 if coupled else row.get("weight_decay", 0.0) * (1 + replica)
        made.append(row | own)
    return made
