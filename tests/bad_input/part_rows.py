"""Malformed calls of ensembles, averages, the initialisation, reports, backends and the published class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.bad_input.rows import INF, NAN, Row, each, out_of_range, wrong_kinds

WHOLE = "a whole number of at least 1"


ENSEMBLES: list[Row] = [
    *wrong_kinds("rows", lambda w, rows: RowEnsemble(rows), WHOLE),
    *out_of_range("rows", lambda w, rows: RowEnsemble(rows), WHOLE, 0, -1, 1.5),
    *each(lambda w, among: RowEnsemble(2, among), TypeError, "among must be an ensemble", 3, "gloo", [], what="among "),
    Row("rows in rows", lambda w: RowEnsemble(2, RowEnsemble(2)), ValueError, "among must be processes"),
    Row("no process group", lambda w: hk.ProcessEnsemble(), RuntimeError, "call torch.distributed.init_process_group"),
    Row("no group at all", lambda w: hk.ProcessEnsemble("gloo"), RuntimeError, "init_process_group"),  # type: ignore[arg-type]
]


def buckets(**arguments: Any) -> Callable[[Any], object]:
    return lambda w: hk.Buckets(**{"params": list(w.bare_model.parameters()), **arguments})


def converger(**arguments: Any) -> Callable[[Any], object]:
    given: dict[str, Any] = {"ensemble": SingleReplica(), **arguments}
    return lambda w: hk.Converger(
        given.get("params", list(w.bare_model.parameters())),
        **{name: value for name, value in given.items() if name != "params"},
    )


def converged(name: str) -> Callable[[Any, Any], object]:
    return lambda w, value: converger(**{name: value})(w)


NO_PARAMS = (None, 3, "ab", {"weight": torch.ones(2)}, nn.Linear(1, 1))

AVERAGES: list[Row] = [
    *each(lambda w, params: hk.Buckets(params), TypeError, "expected several tensors", *NO_PARAMS, what="Buckets "),
    *each(lambda w, params: hk.Buckets(params), TypeError, "expected tensors, parameter 0 is a", [1.0], [None], ["a"]),
    Row("a single tensor", lambda w: hk.Buckets(torch.ones(2)), TypeError, r"pass \[tensor\]"),
    Row("no parameters", lambda w: hk.Buckets([]), ValueError, "Buckets got no parameters"),
    Row("meta parameters", lambda w: hk.Buckets([torch.ones(2, device="meta")]), ValueError, "meta device"),
    Row("gaps", lambda w: hk.Buckets([torch.ones(4, 4)[:, :2]]), ValueError, "gaps or overlaps"),
    *wrong_kinds("bucket_bytes", lambda w, n: buckets(bucket_bytes=n)(w), WHOLE),
    *out_of_range("bucket_bytes", lambda w, n: buckets(bucket_bytes=n)(w), WHOLE, 0, -1, 0.5, INF),
    *each(converged("params"), TypeError, "expected several tensors", *NO_PARAMS, what="Converger "),
    *each(converged("params"), ValueError, "no parameters to average", [], [torch.ones(2, dtype=torch.int64)]),
    Row("meta, averaged", converger(params=[torch.ones(2, device="meta")]), ValueError, "meta device"),
    *each(converged("ensemble"), TypeError, "ensemble must be an ensemble", None, 3, object(), SingleReplica),
    Row(
        "65 rows",
        converger(ensemble=RowEnsemble(65)),
        ValueError,
        "at most 64 replicas of one process are averaged, got 65",
    ),
    Row("rows of plain tensors", converger(ensemble=RowEnsemble(3)), ValueError, "3 replicas are the rows of tensors"),
    *each(converged("state"), TypeError, r"state must be callable as state\(\)", None, {}, what="state "),
    *each(converged("buffers"), TypeError, r"buffers must be callable as buffers\(\)", None, [], what="buffers "),
    *each(
        converged("compress"),
        ValueError,
        "compress must be one of None, 'bf16', 'int8'",
        "fp8",
        True,
        8,
        what="compress ",
    ),
    *each(converged("backup"), ValueError, "backup must be True or False", 1, "no", None, what="backup "),
    *each(
        converged("outer"), TypeError, "outer must be None or an hdet_kernels.Outer", 0.7, {}, hk.Outer, what="outer "
    ),
    *each(converged("merge"), ValueError, "merge must be one of 'mean', 'best'", "max", None, 1, what="merge "),
    *each(converged("backend"), ValueError, "unknown backend", "nccl", 3, what="backend "),
    *wrong_kinds("lr", lambda w, lr: hk.Outer(lr=lr), "a positive number"),
    *out_of_range("lr", lambda w, lr: hk.Outer(lr=lr), "a positive number", 0, -0.7, NAN, INF),
    *wrong_kinds("momentum", lambda w, momentum: hk.Outer(momentum=momentum), "a number between 0 and 1"),
    *out_of_range("momentum", lambda w, momentum: hk.Outer(momentum=momentum), "between 0 and 1", -0.1, 1.0, NAN),
    *each(lambda w, flag: hk.Outer(nesterov=flag), ValueError, "nesterov must be True or False", 1, "no", None),
]


def noise(**arguments: Any) -> Callable[[Any], object]:
    return lambda w: hk.warm_noisy_init_(**{"params": list(w.bare_model.parameters()), **arguments})


INITIALISATION: list[Row] = [
    *each(lambda w, params: hk.warm_noisy_init_(params), TypeError, "expected several tensors", *NO_PARAMS),
    *each(lambda w, params: hk.warm_noisy_init_(params), TypeError, "expected tensors, parameter 0", [1.0], [None]),
    *each(
        lambda w, params: hk.warm_noisy_init_(params),
        ValueError,
        "no floating-point parameters",
        [],
        [torch.ones(2).int()],
    ),
    Row("meta", lambda w: hk.warm_noisy_init_([torch.ones(2, device="meta")]), ValueError, "meta device"),
    *wrong_kinds("nu", lambda w, nu: noise(nu=nu)(w), "a finite number of at least 0"),
    *out_of_range("nu", lambda w, nu: noise(nu=nu)(w), "a finite number of at least 0", -0.01, NAN, INF),
    *wrong_kinds("seed", lambda w, seed: noise(seed=seed)(w), "a whole number"),
    *out_of_range("seed", lambda w, seed: noise(seed=seed)(w), "a whole number", 0.5, NAN),
    *each(
        lambda w, scope: noise(scope=scope)(w), ValueError, "scope must be one of 'tensor', 'global'", "all", None, 1
    ),
    *each(lambda w, ensemble: noise(ensemble=ensemble)(w), TypeError, "ensemble must be an ensemble", 3, "x", object()),
    Row("rows of plain tensors", noise(ensemble=RowEnsemble(3)), ValueError, "3 replicas are the rows of tensors"),
]


def use(world: Any, name: Any) -> None:
    hk.use_backend(name)


REPORTS: list[Row] = [
    *each(
        lambda w, history: hk.report.table(history),
        TypeError,
        "history must be a list of sync records",
        None,
        3,
        "x",
        {},
    ),
    Row("a scheduler", lambda w: hk.report.table(w.scheduler), TypeError, "pass scheduler.history"),
    *each(
        lambda w, history: hk.report.table(history), TypeError, r"history\[0\] must be a SyncRecord", [3], ["x"], [None]
    ),
    *each(
        lambda w, history: hk.report.summary(history),
        ValueError,
        r"history\[0\] must be a SyncRecord",
        [{}],
        [{"step": 1}],
    ),
    *each(
        lambda w, path: hk.report.plot_losses(w.scheduler.history, path),
        TypeError,
        "path must be the path",
        None,
        3,
        what="path ",
    ),
    *each(
        lambda w, name: hk.report.plot_values(w.scheduler.history, "x.png", name),
        TypeError,
        "name must be",
        None,
        3,
        what="name ",
    ),
    Row(
        "no such value",
        lambda w: hk.report.plot_values(w.scheduler.history, "x.png", "lr/7"),
        ValueError,
        "no hyperparameter 'lr/7'",
    ),
    Row("an empty history", lambda w: hk.report.plot_losses([], "x.png"), ValueError, "history is empty"),
    *each(use, ValueError, "unknown backend", "nccl", "", 3, ["torch"], True, what="use_backend "),
    Row("a backend that is not there", lambda w: hk.use_backend("cuda"), RuntimeError, "is not available"),
]


def published(name: str) -> Callable[[Any, Any], object]:
    return lambda w, value: hk.compat.OneCycleAutoLR(w.bare, 0.1, 20, **{name: value})


PUBLISHED: list[Row] = [
    *wrong_kinds("auto_lr_warmup_steps", published("auto_lr_warmup_steps"), "a whole number of at least 0"),
    *out_of_range("auto_lr_warmup_steps", published("auto_lr_warmup_steps"), "a whole number of at least 0", -1, 0.5),
    *out_of_range("ensemble_lr_spread_ratio", published("ensemble_lr_spread_ratio"), "a finite number", -0.1, NAN),
    *out_of_range("model_sync_interval", published("model_sync_interval"), WHOLE, 0, -1, 2.5),
    *out_of_range("rank", published("rank"), "a whole number of at least 0", -1, 0.5),
    *out_of_range("world_size", published("world_size"), WHOLE, 0, -1, 1.5),
    *wrong_kinds("world_size", published("world_size"), WHOLE),
    Row(
        "no process group",
        lambda w: published("world_size")(w, 4),
        ValueError,
        "world_size=4, but there is no process group",
    ),
    *each(published("enable_auto_lr"), ValueError, "enable_auto_lr must be True or False", "no", 1, None),
    *out_of_range("loss_scale", published("loss_scale"), "a positive number", 0, -1, NAN),
    *out_of_range("lr_of_lr", published("lr_of_lr"), "a positive number", 0, -1, NAN),
    *out_of_range("momentum_of_lr", published("momentum_of_lr"), "between 0 and 1", 1.0, -0.1, NAN),
]


def run_with(name: str) -> Callable[[Any, Any], object]:
    return lambda w, value: hk.Run(**{"total_steps": 100, "sync_every": 10, "peak": 0.3, "floors": (), name: value})


FRONTENDS: list[Row] = [
    *wrong_kinds("total_steps", run_with("total_steps"), WHOLE, leave_out=["None"]),
    *out_of_range("total_steps", run_with("total_steps"), WHOLE, 0, -1, 2.5),
    *wrong_kinds("sync_every", run_with("sync_every"), WHOLE),
    *out_of_range("sync_every", run_with("sync_every"), WHOLE, 0, -1, 2.5),
    *out_of_range("peak", run_with("peak"), "between 0 and 1", -0.1, 1.5, NAN),
    *each(run_with("gradients"), ValueError, "gradients must be", "both", None, 3, what="gradients "),
    Row(
        "a run of other groups",
        lambda w: hk.Spread.of(w.bare.param_groups, SingleReplica(), run=hk.Run(9, 3, 0.3, (None,) * 9), spread=0.3),
        ValueError,
        "run.floors has 9 entries",
    ),
    Row(
        "a spread of 1",
        lambda w: hk.Spread.of(w.bare.param_groups, SingleReplica(), run=hk.Run(9, 3, 0.3, ()), spread=1.0),
        ValueError,
        "spread must be below 1",
    ),
    Row(
        "an unknown option of the converger",
        lambda w: hk.converger_of(w.bare, SingleReplica(), compression="bf16"),
        TypeError,
        "unexpected keyword argument 'compression'",
    ),
]

AREAS = {
    "frontends": FRONTENDS,
    "ensembles": ENSEMBLES,
    "averages": AVERAGES,
    "initialisation": INITIALISATION,
    "reports and backends": REPORTS,
    "published class": PUBLISHED,
}
