"""Writing the hyperparameters of ``param_groups`` to the tables that the kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any, ClassVar, Protocol

from torch import Tensor

from hdet_kernels.optim.checks import check_seed
from hdet_kernels.optim.flat_group import FlatGroup
from hdet_kernels.optim.group_entries import PER_REPLICA, Group
from hdet_kernels.optim.per_replica import replica_groups, shares_moments
from hdet_kernels.optim.state_views import StateViews

#: Options of torch.optim that choose an implementation. They are dropped from the groups of a loaded state_dict.
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")

#: The group entry with the seed of stochastic rounding. It is saved, so that a resumed run rounds as the whole run.
ROUNDING_SEED = "rounding_seed"


class OptimizerWithRows(Protocol):
    """The attributes of an optimizer that :class:`HyperparameterWriter` needs."""

    rule: ClassVar[str]
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def max_grad_norm(self) -> float | None: ...

    def check_group(self, group: Group) -> None: ...

    def row(self, group: Group) -> dict[str, float | Tensor]: ...


class HyperparameterWriter:
    """Writes a row for each replica and parameter group into the hyperparameter tables, when a number changed.

    Args:
        optimizer: the optimizer whose groups are read.
        flat_groups: the flat groups whose tables are written.
        state_views: the state, which becomes each replica's own once their numbers for the moments differ.
        replicas: the number of replicas of stacked parameters; None for plain ones.
    """

    def __init__(
        self,
        optimizer: OptimizerWithRows,
        flat_groups: list[FlatGroup],
        state_views: StateViews,
        replicas: int | None,
    ) -> None:
        self.optimizer, self.flat_groups, self.state_views = optimizer, flat_groups, state_views
        self.replicas = replicas
        self._tables = list({id(flat.table): flat.table for flat in flat_groups}.values())
        self._values_of = itemgetter(*(name for name in optimizer.defaults if name not in IMPLEMENTATION_OPTIONS))
        self._written: list[Any] | None = None

    def invalidate(self) -> None:
        """Write everything again the next time."""
        self._written = None

    def write(self) -> None:
        """Bring the hyperparameters to the devices."""
        groups = self.optimizer.param_groups
        if self._written is None or any(map(_has_per_replica, groups)):
            self._write_all()
            return
        values = list(map(self._values_of, groups))
        if len(values) == len(self._written) and all(map(_are_same, values, self._written)):
            return
        if not _only_floats_changed(values, self._written):
            self._write_all()
        elif values != self._written:  # as a schedule does at every step
            self._write_tables([self._table_row(group) for group in groups])
            self._written = values

    def _write_all(self) -> None:
        """Write numbers, tensors and per-replica values, with all checks."""
        groups = self.optimizer.param_groups
        for group in groups:
            freeze_betas(group)
        values = [(*self._values_of(group), *group.get(PER_REPLICA, {}).items()) for group in groups]
        # The value of a tensor can change in place: then the tables are written every time.
        has_tensors = any(isinstance(value, Tensor) for group_values in values for value in _flattened(group_values))
        if not has_tensors and values == self._written:
            return
        for group in groups:
            self.optimizer.check_group(group)
            check_seed(group.get(ROUNDING_SEED, 0))
        by_group = [replica_groups(group, self.replicas) for group in groups]
        table_rows = [self._table_row(group) for group in chain.from_iterable(zip(*by_group, strict=True))]
        if self.flat_groups[0].shares_state and not shares_moments(self.optimizer.rule, table_rows, len(groups)):
            self.state_views.separate()
        self._write_tables(table_rows)
        self._written = None if has_tensors else values

    def _table_row(self, group: Group) -> dict[str, float | Tensor]:
        row = self.optimizer.row(group)
        row["max_grad_norm"] = self.optimizer.max_grad_norm or 0.0
        row["seed"] = group.get(ROUNDING_SEED, 0)
        return row

    def _write_tables(self, table_rows: list[dict[str, float | Tensor]]) -> None:
        for table in self._tables:
            table.write(table_rows)
        self.state_views.update_names()


def freeze_betas(group: Group) -> None:
    """Make ``betas`` and the like tuples: a change inside a list would go unnoticed."""
    for name in ("betas", "adamw_betas", "ns_coefficients"):
        if isinstance(group.get(name), list):
            group[name] = tuple(group[name])


def _has_per_replica(group: Group) -> bool:
    return PER_REPLICA in group


def _are_same(values: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether hyperparameters are the same objects as before."""
    return len(values) == len(before) and all(map(is_, values, before))


def _only_floats_changed(values: list[tuple[Any, ...]], before: list[tuple[Any, ...]]) -> bool:
    """Return whether every hyperparameter is the same object as before, or a float in the place of a float."""
    if len(values) != len(before):
        return False
    for group_values, earlier in zip(values, before, strict=True):
        if len(group_values) != len(earlier):
            return False
        for now, then in zip(group_values, earlier, strict=True):
            if now is then or (type(now) is float and type(then) is float):
                continue
            if not (type(now) is tuple and type(then) is tuple and len(now) == len(then)):
                return False
            if not all(type(value) is float for value in now + then):
                return False
    return True


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flattened(value)
        else:
            yield value
