"""Explore and its expansion into one hyperparameter for every parameter group."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels import Explore, multipliers, permutation
from hdet_kernels.fanout.explore import Hyperparameter, expand


def adam_groups(count: int = 2, **entries: Any) -> list[dict[str, Any]]:
    """Return parameter groups as an optimizer has them, each with its own learning rate and weight decay."""
    return [
        {
            "params": [torch.nn.Parameter(torch.full((2,), float(g)))],
            "lr": 0.1 * (g + 1),
            "betas": (0.9, 0.99 - 0.01 * g),
            "eps": 1e-8,
            "weight_decay": 0.01 * (g + 1),
            "amsgrad": False,
            "steps": 7,
            "foreach": None,
            **entries,
        }
        for g in range(count)
    ]


def shown(hyper: Hyperparameter) -> tuple[Any, ...]:
    return hyper.name, hyper.spread, hyper.base, hyper.group, hyper.key


class TestExpand:
    def test_without_explore_every_group_has_its_learning_rate(self) -> None:
        found = expand((), adam_groups(3), 0.3)
        assert [shown(h) for h in found] == [(f"lr/{g}", 0.3, None, g, "lr") for g in range(3)]
        assert {(h.spacing, h.bounds, h.apply) for h in found} == {("linear", None, None)}

    def test_a_scalar_is_explored_in_every_group_around_its_own_value(self) -> None:
        found = expand([Explore("weight_decay", spread=0.5)], adam_groups(), 0.2)
        assert [shown(h) for h in found] == [
            ("lr/0", 0.2, None, 0, "lr"),
            ("lr/1", 0.2, None, 1, "lr"),
            ("weight_decay/0", 0.5, 0.01, 0, "weight_decay"),
            ("weight_decay/1", 0.5, 0.02, 1, "weight_decay"),
        ]

    def test_only_the_named_groups(self) -> None:
        found = expand([Explore("weight_decay", groups=[1, 3])], adam_groups(4), 0.2)
        assert [h.name for h in found[4:]] == ["weight_decay/1", "weight_decay/3"]

    def test_one_group_may_have_an_explore_of_its_own(self) -> None:
        explores = [Explore("eps", 0.1, groups=[0]), Explore("eps", 0.2, groups=[1])]
        assert [shown(h)[:2] for h in expand(explores, adam_groups(), 0.3)[2:]] == [("eps/0", 0.1), ("eps/1", 0.2)]

    def test_a_given_base_replaces_the_groups_value(self) -> None:
        found = expand([Explore("weight_decay", base=0.5)], adam_groups(weight_decay=0.0), 0.2)
        assert [h.base for h in found[2:]] == [0.5, 0.5]

    def test_an_entry_of_a_tuple(self) -> None:
        found = expand([Explore("betas[1]", spread=0.005, bounds=(0.9, 0.9999))], adam_groups(), 0.2)
        assert [shown(h) for h in found[2:]] == [
            ("betas[1]/0", 0.005, 0.99, 0, "betas[1]"),
            ("betas[1]/1", 0.005, 0.98, 1, "betas[1]"),
        ]

    def test_an_integer_becomes_a_float(self) -> None:
        base = expand([Explore("steps", groups=[0])], adam_groups(), 0.2)[-1].base
        assert isinstance(base, float)
        assert base == 7.0

    def test_a_learning_rate_override_for_some_groups(self) -> None:
        override = Explore("lr", spread=9.0, spacing="log", bounds=(1e-6, 1.0), groups=[1])
        found = expand([override], adam_groups(3), 0.3)
        assert [shown(h) for h in found] == [
            ("lr/0", 0.3, None, 0, "lr"),
            ("lr/1", 9.0, None, 1, "lr"),
            ("lr/2", 0.3, None, 2, "lr"),
        ]
        assert [h.spacing for h in found] == ["linear", "log", "linear"]
        assert [h.bounds for h in found] == [None, (1e-6, 1.0), None]

    def test_a_learning_rate_override_for_all_groups(self) -> None:
        assert [h.spread for h in expand([Explore("lr", spread=0.1)], adam_groups(), 0.3)] == [0.1, 0.1]

    def test_learning_rates_come_first_whatever_the_order_of_explores(self) -> None:
        explores = [Explore("eps"), Explore("lr", 0.1, groups=[1]), Explore("weight_decay", groups=[0])]
        names = [h.name for h in expand(explores, adam_groups(), 0.3)]
        assert names == ["lr/0", "lr/1", "eps/0", "eps/1", "weight_decay/0"]

    def test_a_setter_has_one_hyperparameter_and_no_group(self) -> None:
        found = expand([Explore("dropout", 0.5, base=0.1, apply=print)], adam_groups(), 0.3)
        assert shown(found[-1]) == ("dropout", 0.5, 0.1, None, "dropout")
        assert found[-1].apply is print
        assert len(found) == 3

    def test_explores_may_come_from_a_generator(self) -> None:
        assert len(expand((Explore(name) for name in ("eps", "weight_decay")), adam_groups(), 0.3)) == 6

    def test_a_tensor_learning_rate(self) -> None:
        assert [h.base for h in expand((), adam_groups(lr=torch.tensor(0.1)), 0.3)] == [None, None]

    def test_changes_neither_groups_nor_setters(self) -> None:
        calls: list[float] = []
        groups = adam_groups(lr=torch.tensor(0.1))
        before, objects = copy.deepcopy(groups), [dict(group) for group in groups]
        explores = [
            Explore("weight_decay"),
            Explore("betas[0]", 0.05, bounds=(0.5, 0.99)),
            Explore("lr", 0.1, groups=[0]),
            Explore("dropout", base=0.1, apply=calls.append),
        ]
        expand(explores, groups, 0.3)
        assert calls == []
        for group, old, held in zip(groups, before, objects, strict=True):
            assert all(group[key] is held[key] for key in held)
            assert group.keys() == old.keys()
            assert torch.equal(group["params"][0], old["params"][0])
            assert group["lr"] == old["lr"]


def no_call(value: float) -> None:
    raise AssertionError(value)


REFUSED = [
    (
        "unknown key",
        [Explore("decay")],
        "'decay' is not a key .* it has eps, lr, steps, weight_decay.*apply= and base=",
    ),
    ("unknown tuple", [Explore("momenta[1]")], "'momenta' is not a key"),
    ("a tuple", [Explore("betas")], r"'betas' must be a number, the group holds \(0\.9"),
    ("a flag", [Explore("amsgrad")], "'amsgrad' must be a number, the group holds False"),
    ("None", [Explore("foreach")], "'foreach' must be a number, the group holds None"),
    ("past the tuple", [Explore("betas[2]")], r"'betas\[2\]' does not exist: the group holds betas=\(0\.9"),
    ("entry of a number", [Explore("eps[0]")], r"'eps\[0\]' does not exist: the group holds eps=1e-08"),
    ("lr with a base", [Explore("lr", base=0.1)], r"Explore\('lr', base=0.1\) has no meaning: the schedule gives"),
    ("lr twice", [Explore("lr", groups=[1]), Explore("lr")], "learning rate of parameter group 1 is explored twice"),
    ("scalar twice", [Explore("eps"), Explore("eps", groups=[1])], "explored twice: eps/1; give every"),
    ("group twice", [Explore("eps", groups=[0, 0])], "explored twice: eps/0"),
    (
        "setter twice",
        [Explore("p", base=1, apply=no_call), Explore("p", base=2, apply=no_call)],
        "explored twice: p",
    ),
    ("setter named like a group's", [Explore("lr/1", base=1, apply=no_call)], "explored twice: lr/1"),
    (
        "group too high",
        [Explore("eps", groups=[0, 2])],
        r"groups=\[0, 2\]\) names parameter group 2; .* has 2, counted",
    ),
    ("negative group", [Explore("lr", groups=[-1])], "names parameter group -1; the optimizer has 2"),
    (
        "base over bounds",
        [Explore("eps", bounds=(1e-6, 1))],
        r"base value 1e-08 of eps/0 lies outside .*\(1e-06, 1.0\)",
    ),
    (
        "decay without bounds",
        [Explore("betas[1]", spread=0.3)],
        r"Explore\('betas\[1\]'\) needs bounds= that end below 1",
    ),
    ("decay up to 1", [Explore("betas[0]", bounds=(0.5, 1.0))], r"end below 1, got \(0\.5, 1\.0\)"),
    ("base under bounds", [Explore("p", base=2, bounds=(0, 1), apply=no_call)], "base value 2.0 of p lies outside"),
]


class TestExpandRefuses:
    @pytest.mark.parametrize(("explores", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
    def test_hyperparameters_that_cannot_be_explored(self, explores: list[Explore], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            expand(explores, adam_groups(), 0.3)

    @pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
    def test_a_base_value_that_is_not_positive(self, value: float) -> None:
        with pytest.raises(ValueError, match=rf"base value of weight_decay of parameter group 0 .* got {value}.*base="):
            expand([Explore("weight_decay")], adam_groups(weight_decay=value), 0.3)

    @pytest.mark.parametrize("wrong", ["weight_decay", 0.3, None, ("eps", 0.1)], ids=repr)
    def test_objects_that_are_not_an_explore(self, wrong: object) -> None:
        with pytest.raises(TypeError, match=r"takes hdet_kernels.Explore objects, got"):
            expand([wrong], adam_groups(), 0.3)

    @pytest.mark.parametrize("spread", [-0.1, 1.0, math.nan])
    def test_the_learning_rates_spread(self, spread: float) -> None:
        with pytest.raises(ValueError, match=r"^spread must be"):
            expand((), adam_groups(), spread)


class TestExploreRefuses:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"spread": 1.0}, ValueError, "spread of 'x' must be below 1"),
            ({"spread": -1}, ValueError, "spread of 'x' must be a finite number of at least 0, got -1"),
            ({"spacing": "cubic"}, ValueError, "spacing must be one of 'linear', 'log', got 'cubic'"),
            ({"bounds": (1.0, 0.0)}, ValueError, r"bounds of 'x' must be \(lowest, highest\), got \(1.0, 0.0\)"),
            ({"bounds": (1.0, 1.0)}, ValueError, "bounds of 'x'"),
            ({"bounds": (0.5, 1.0, 2.0)}, ValueError, "bounds of 'x'"),
            ({"bounds": (math.nan, 1.0)}, ValueError, "bounds of 'x'"),
            ({"base": 0.0}, ValueError, "base value of x must be a positive number, got 0.0"),
            ({"base": -1.0}, ValueError, "base value of x must be a positive number, got -1.0"),
            ({"base": math.inf}, ValueError, "base value of x must be a positive number, got inf"),
            ({"base": math.nan}, ValueError, "base value of x must be a positive number, got nan"),
            ({"apply": print}, ValueError, "needs base="),
            ({"apply": 3, "base": 1.0}, TypeError, "apply of 'x' must be callable as apply\\(value\\), got 3"),
            ({"apply": print, "base": 1.0, "groups": [0]}, ValueError, "leave out groups="),
        ],
        ids=str,
    )
    def test_bad_arguments(self, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            Explore("x", **arguments)

    def test_a_wide_log_spread_is_accepted(self) -> None:
        assert Explore("x", spread=9, spacing="log").spread == 9

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            Explore("eps").spread = 0.1


def hyper(**changes: Any) -> Hyperparameter:
    return Hyperparameter(
        **{"name": "eps/0", "spread": 0.3, "spacing": "linear", "bounds": None, "base": 1.0} | changes
    )


class TestHyperparameter:
    @pytest.mark.parametrize("n", [1, 2, 5, 8])
    @pytest.mark.parametrize("spacing", ["linear", "log"])
    def test_replica_r_has_the_multiplier_that_the_permutation_gives_it(self, n: int, spacing: str) -> None:
        rho = multipliers(n, 0.4, spacing)
        order = permutation(n, seed=5, cycle=3, hyperparameter="eps/0")
        found = hyper(spread=0.4, spacing=spacing).multipliers(n, seed=5, cycle=3)
        assert found.tolist() == [rho[order[r]] for r in range(n)]

    def test_two_hyperparameters_have_permutations_of_their_own(self) -> None:
        a, b = (hyper(name=name).multipliers(16, seed=0, cycle=0).tolist() for name in ("lr/0", "lr/1"))
        assert a != b
        assert sorted(a) == sorted(b)

    @pytest.mark.parametrize(("value", "expected"), [(0.05, 0.1), (0.1, 0.1), (0.5, 0.5), (2.0, 2.0), (3.0, 2.0)])
    def test_bounds_of_a_number(self, value: float, expected: float) -> None:
        assert hyper(bounds=(0.1, 2.0)).bounded(value) == expected

    def test_reach_is_the_logarithm_of_the_factors_that_bounds_allow(self) -> None:
        assert hyper(base=0.4, bounds=(0.1, 1.0)).reach == pytest.approx((math.log(0.25), math.log(2.5)))
        assert hyper(base=0.4, bounds=(0.0, 1.0)).reach == pytest.approx((-math.inf, math.log(2.5)))
        assert hyper(base=0.4).reach == (-math.inf, math.inf)
        assert hyper(base=None, bounds=(0.1, 1.0)).reach == (-math.inf, math.inf)

    def test_several_values_are_written_to_the_group_beside_their_base(self) -> None:
        groups = adam_groups()
        hyper(group=1, key="eps").write(groups, 2.0, several=(1.5, 2.5))
        assert groups[1]["eps"] == 2.0
        assert groups[1]["per_replica"] == {"eps": (1.5, 2.5)}
        assert "per_replica" not in groups[0]

    def test_bounds_of_an_array(self) -> None:
        values = np.array([0.05, 0.5, 3.0])
        assert hyper(bounds=(0.1, 2.0)).bounded(values).tolist() == [0.1, 0.5, 2.0]
        assert values.tolist() == [0.05, 0.5, 3.0]

    def test_bounds_of_a_tensor(self) -> None:
        assert [float(hyper(bounds=(0.1, 2.0)).bounded(torch.tensor(v))) for v in (0.05, 0.5, 3.0)] == pytest.approx(
            [0.1, 0.5, 2.0]
        )

    def test_no_bounds(self) -> None:
        values = np.array([1e-30, 1e30])
        assert hyper().bounded(values) is values
        assert hyper().bounded(1e30) == 1e30

    def test_write_to_its_group_alone(self) -> None:
        groups = adam_groups(3)
        hyper(group=1, key="weight_decay").write(groups, 0.7)
        assert [group["weight_decay"] for group in groups] == [0.01, 0.7, 0.03]

    def test_write_to_a_setter_and_to_no_group(self) -> None:
        class Layer:
            p = 0.5

        layer, groups = Layer(), adam_groups()
        explore = Explore("dropout", base=0.1, apply=lambda p: setattr(layer, "p", p))
        expand([explore], groups, 0.3)[-1].write(groups, 0.12)
        assert layer.p == 0.12
        assert [group["lr"] for group in groups] == [0.1, 0.2]
        assert "dropout" not in groups[0]


def test_no_group_at_all_and_half_a_bound_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups=\[\]\) explores nothing"):
        Explore("eps", groups=[])
    with pytest.raises(ValueError, match=r"bounds of 'eps' must be \(lowest, highest\), got \(0\.1,\)"):
        Explore("eps", bounds=(0.1,))  # type: ignore[arg-type]
