"""Malformed calls of ensembles, averages, the initialisation, reports, backends and the published class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.integrations.probe import BatchProbe
from tests.bad_input.rows import BOTH, INF, NAN, Entry, Row, built, flags, named, number, refused

META = torch.ones(2, device="meta")
NO_PARAMS = (None, 3, np.array(0.5), "ab", {"weight": torch.ones(2)}, nn.Linear(1, 1), torch.ones(2), [1.0], [None])


def with_params(kind: Callable[..., object], **given: Any) -> Entry:
    """Return an entry that calls ``kind`` over the parameters of the untouched model."""
    return lambda world, **keywords: kind(**{"params": list(world.bare_model.parameters()), **given, **keywords})


rows, outer = built(RowEnsemble, rows=2), built(hk.Outer)
buckets, noise = with_params(hk.Buckets), with_params(hk.warm_noisy_init_)
converger = with_params(hk.Converger, ensemble=SingleReplica())

AVERAGES: list[Row] = [
    *number(rows, "rows", 0, -1, 1.5),
    *refused(rows, "among", TypeError, 3, "gloo", []),
    *refused(rows, "among", ValueError, RowEnsemble(2)),
    Row("no process group", lambda w: hk.ProcessEnsemble(), RuntimeError, "init_process_group"),
    *refused(buckets, "params", TypeError, *NO_PARAMS),
    *refused(buckets, "params", ValueError, [], argument="parameters"),
    *refused(buckets, "params", ValueError, [META], argument="meta device"),
    *refused(buckets, "params", ValueError, [torch.ones(4, 4)[:, :2]], argument="gaps"),
    *number(buckets, "bucket_bytes", 0, 0.5, INF),
    *refused(buckets, "kind_of", TypeError, 3, "dtype", lambda: None),
    *named("Converger", refused(converger, "params", TypeError, *NO_PARAMS)),
    *named("Converger", refused(converger, "params", ValueError, [], [torch.ones(2).long()], argument="parameters")),
    *named("Converger", refused(converger, "params", ValueError, [META], argument="meta device")),
    *refused(converger, "ensemble", TypeError, None, 3, object(), SingleReplica),
    *refused(converger, "ensemble", ValueError, RowEnsemble(65), RowEnsemble(3), argument="replicas"),
    *refused(converger, "state", TypeError, None, {}),
    *refused(converger, "buffers", TypeError, None, [], lambda rows: []),
    *refused(converger, "names", TypeError, None, ["weight"], lambda rows: []),
    *refused(converger, "write_state", TypeError, 3, {}, lambda: None),
    *refused(converger, "counts", TypeError, 3, torch.ones(2)),
    *refused(converger, "compress", ValueError, "fp8", True, 8),
    *flags(converger, "backup"),
    *refused(converger, "outer", TypeError, 0.7, {}, hk.Outer),
    *refused(converger, "merge", ValueError, "max", None, 1),
    *refused(converger, "backend", ValueError, "nccl", 3),
    *number(outer, "lr", 0, -0.7, NAN, INF),
    *number(outer, "momentum", -0.1, 1.0, NAN),
    *flags(outer, "nesterov"),
]

INITIALISATION: list[Row] = [
    *refused(noise, "params", TypeError, *NO_PARAMS),
    *refused(noise, "params", ValueError, [], [torch.ones(2).int()], argument="parameters"),
    *refused(noise, "params", ValueError, [META], argument="meta device"),
    *number(noise, "nu", -0.01, NAN, INF),
    *number(noise, "seed", 0.5, NAN),
    *refused(noise, "scope", ValueError, "all", None, 1),
    *refused(noise, "ensemble", TypeError, 3, "x", object()),
    *refused(noise, "ensemble", ValueError, RowEnsemble(3), argument="replicas"),
]


def plot(world: Any, **keywords: Any) -> object:
    return hk.report.plot_values(**{"history": world.scheduler.history, "path": "x.png", "name": "lr/0", **keywords})


probe = built(BatchProbe, model=nn.ReLU(), loss_fn=lambda model, batch: model(batch), batch=torch.ones(2))

REPORTS: list[Row] = [
    *refused(built(hk.report.table), "history", BOTH, None, 3, "x", {}, [3], ["x"], [None], [{}], [{"step": 1}]),
    *named("table", refused(built(hk.report.table), "history", TypeError, torch.tensor(0.5), np.array(0.5))),
    Row("a scheduler", lambda w: hk.report.table(w.scheduler), TypeError, "scheduler.history"),
    *refused(probe, "device", BOTH, "", "gpu", -1, 0.5, []),
    *refused(probe, "loss_fn", TypeError, None, lambda model: 0.0),
    *refused(probe, "autocast", TypeError, 3, lambda device: None),
    *refused(probe, "group", TypeError, 3, "gloo", []),
    *refused(plot, "path", TypeError, None, 3),
    *refused(plot, "name", TypeError, None, 3),
    *refused(plot, "name", ValueError, "lr/7", argument="lr/7"),
    Row("an empty history", lambda w: hk.report.plot_losses([], "x.png"), ValueError, "history"),
    *refused(built(hk.use_backend), "name", ValueError, "nccl", "", 3, ["torch"], True, argument="backend"),
    *refused(built(hk.use_backend), "name", RuntimeError, "cuda", argument="cuda"),
]


def published(world: Any, **keywords: Any) -> object:
    return hk.compat.OneCycleAutoLR(world.bare, 0.1, 20, **keywords)


PUBLISHED: list[Row] = [
    *number(published, "auto_lr_warmup_steps", -1, 0.5),
    *number(published, "ensemble_lr_spread_ratio", -0.1, NAN),
    *number(published, "model_sync_interval", 0, -1, 2.5),
    *number(published, "rank", -1, 0.5),
    *number(published, "world_size", 0, -1, 1.5, 4),
    *flags(published, "enable_auto_lr"),
    *number(published, "loss_scale", 0, -1, NAN),
    *number(published, "lr_of_lr", 0, -1, NAN),
    *number(published, "momentum_of_lr", 1.0, -0.1, NAN),
]

AREAS = {
    "averages": AVERAGES,
    "initialisation": INITIALISATION,
    "reports and backends": REPORTS,
    "published class": PUBLISHED,
}
