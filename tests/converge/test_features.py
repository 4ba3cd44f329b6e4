"""One table: what every way to average promises, for every way to hold parameters, on every device.

A resumed run is the uninterrupted one, bit for bit. ``consensus()`` has the mean and leaves no trace. A replica that is
not finite is left out and healed. A collective that fails leaves everything as it was, and the next try succeeds.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from tests.converge.replicas import Replicas
from tests.ranks import Cases
from tests.training import same

RANKS, SYNC, TOTAL = 2, 3, 9
#: At the start, in the first cycle, at a sync, and after it, where an overlapped average is on its way.
SAVED_AT = (0, 2, 2 * SYNC, 2 * SYNC + 1)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap_steps": 2},
    "outer": {"outer": hk.Outer()},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "overlap, int8": {"overlap_steps": 2, "compress": "int8"},
    "outer, bf16": {"outer": hk.Outer(), "compress": "bf16"},
}
#: Rows of a stack (0: none), dtype, optimizer.
OPTIMIZERS: dict[str, tuple[int, torch.dtype, Callable[..., Any]]] = {
    "torch": (0, torch.float32, torch.optim.AdamW),
    "adamw": (0, torch.float32, hk.FusedAdamW),
    "masters": (0, torch.bfloat16, hk.FusedAdamW),
    "8 bits": (0, torch.float32, partial(hk.FusedAdamW, state_dtype="int8")),
    "sgd": (0, torch.float32, partial(hk.FusedSGD, momentum=0.9)),
    "lion": (0, torch.float32, hk.FusedLion),
    "stack": (2, torch.float32, hk.FusedAdamW),
    "stack of masters": (2, torch.bfloat16, hk.FusedAdamW),
}


class Run:
    """A run of one cell of the table in this process."""

    def __init__(self, rank: int, feature: str, optimizer: str, device: str) -> None:
        settings = {"max_lr": 0.05, "total_steps": TOTAL, "sync_every": SYNC, "auto_lr": False, "bucket_bytes": 256}
        rows, dtype, make = OPTIMIZERS[optimizer]
        self.new = partial(Replicas, rank, rows, dtype, make, device, **settings, **FEATURES[feature])
        self.rank, self.rows, self.overlaps = rank, max(rows, 1), "overlap" in feature

    def resumes(self, whole: Replicas, files: dict[int, bytes]) -> list[bool]:
        """Whether the run that resumes from each file ends as the whole one."""
        ends = everything(whole)
        return [same(everything(self.new().load(saved).train(TOTAL - at)), ends) for at, saved in files.items()]

    def evaluates(self, whole: Replicas) -> tuple[list[bool], list[tuple[Tensor, Tensor]]]:
        """Whether a look at the consensus after every step leaves no trace; and the own and the averaged parameters."""
        replicas, found, restored = self.new(), [], []
        for _ in range(TOTAL):
            own = replicas.train(1).numbers()
            with replicas.scheduler.consensus():
                found.append((own, replicas.numbers()))
            restored.append(torch.equal(own, replicas.numbers()))
        return [*restored, same(everything(replicas), everything(whole))], found

    def heals(self) -> tuple[list[list[int]], Tensor]:
        """The replicas that were left out at every sync, of which the last of rank 1 breaks before the second."""
        replicas = self.new().train(2 * SYNC - 1)
        loss = replicas.optimize()
        if self.rank == 1:
            next(replicas.model.parameters()).data.view(self.rows, -1)[-1, 3] = math.nan
            if (buckets := getattr(replicas.optimizer, "buckets", None)) is not None:
                buckets.views(buckets.full)[0].view(self.rows, -1)[-1, 3] = math.nan
        replicas.scheduler.step(loss)
        replicas.train(TOTAL - 2 * SYNC)
        return [record.excluded for record in replicas.scheduler.history], replicas.numbers()

    def survives(self, whole: Replicas) -> list[bool]:
        """Whether a sync whose second collective fails changes nothing, and the run then goes on as the whole one."""
        replicas = self.new().train(2 * SYNC - 1)
        loss = replicas.optimize()
        before = torch.load(io.BytesIO(replicas.save()), weights_only=True)
        ensemble = replicas.scheduler.cycle.ensemble
        among = getattr(ensemble, "among", ensemble)
        calls = itertools.count()

        def failing(original: Callable[..., Any], *args: Any) -> Any:
            if next(calls) == 1:
                raise RuntimeError("the peer is gone")
            return original(*args)

        for name in ("all_reduce", "exchange"):
            setattr(among, name, partial(failing, getattr(among, name)))
        with pytest.raises(RuntimeError, match="the peer is gone"):
            replicas.scheduler.step(loss)
        after = torch.load(io.BytesIO(replicas.save()), weights_only=True)
        replicas.scheduler.step(loss)
        replicas.train(TOTAL - 2 * SYNC)
        unharmed = [same(a, b) for a, b in zip(before, after, strict=True)]
        return [*unharmed, same(everything(replicas), everything(whole))]


def everything(replicas: Replicas) -> dict[str, Any]:
    """Everything that a run leaves but the seconds that it took."""
    converger = replicas.scheduler.cycle.converger
    return {
        "numbers": replicas.numbers(),
        "optimizer": replicas.optimizer.state_dict(),
        "compression": converger.state_dict(),
        "outer": converger.outer_state_dict(),
        "history": [{**record.to_dict(), "seconds": 0.0} for record in replicas.scheduler.history],
    }


def _cell(rank: int, feature: str, optimizer: str, device: str) -> dict[str, Any]:
    run, files = Run(rank, feature, optimizer, device), {}
    whole = run.new()
    for at in SAVED_AT:
        files[at] = whole.train(at - whole.scheduler.last_epoch).save()
    whole.train(TOTAL - SAVED_AT[-1])
    # What overlaps fails in another thread: test_faults.py.
    return {
        "resumes": run.resumes(whole, files),
        "evaluates": run.evaluates(whole),
        "heals": run.heals(),
        "survives": [] if run.overlaps else run.survives(whole),
        "rows": run.rows,
    }


#: Each feature is in one of these, and each kind of memory: of a torch optimizer, flat buffers, masters, codes, stacks.
QUICK = [
    ("plain", "8 bits"),
    ("overlap", "masters"),
    ("bf16", "torch"),
    ("int8", "adamw"),
    ("outer, bf16", "stack"),
    ("overlap, int8", "sgd"),
]
CELLS = [(feature, optimizer) for feature in FEATURES for optimizer in OPTIMIZERS]
#: Each way alone with each optimizer. Two ways together, which meet in the converger, have one and masters.
MORE = [cell for cell in CELLS if cell not in QUICK and ("," not in cell[0] or cell[1] == "masters")]
ON_CPU = Cases(RANKS, _cell, [(*cell, "cpu") for cell in QUICK], full=[(*cell, "cpu") for cell in MORE])
ON_GPU = Cases(RANKS, _cell, [(*cell, "cuda") for cell in CELLS])


@pytest.mark.parametrize(
    ("feature", "optimizer", "device"),
    [*ON_CPU.params(), *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU.cases)],
)
def test_every_promise_holds(feature: str, optimizer: str, device: str) -> None:
    results = (ON_CPU if device == "cpu" else ON_GPU)[feature, optimizer, device]
    rows = results[0]["rows"]
    for result in results:
        assert result["resumes"] == [True] * len(SAVED_AT)
        traceless, _ = result["evaluates"]
        assert all(traceless)
        assert all(result["survives"])
        excluded, numbers = result["heals"]
        assert excluded == [[], [RANKS * rows - 1], []]
        assert numbers.isfinite().all()
        assert all(torch.equal(row, results[0]["heals"][1][0]) for row in numbers), "all replicas end at one place"
    for looks in zip(*(result["evaluates"][1] for result in results), strict=True):
        mean = torch.cat([own for own, _ in looks]).mean(dim=0)
        for _, inside in looks:
            assert torch.equal(inside, looks[0][1]), "the same everywhere"
            torch.testing.assert_close(inside, mean.expand_as(inside), rtol=1e-5, atol=1e-7)
