"""The findings of controllers at a sync: slopes with errors, and posteriors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hdet_kernels import HypergradientController, RegressionController, SoftmaxController
from hdet_kernels.controller.protocol import ExplainingController, Findings, Observation, Run, State
from hdet_kernels.controller.settings import RegressionSettings
from tests.controller.cases import RUN, fan, observe


def findings(controller: ExplainingController, run: Run, state: State, seen: Observation) -> Findings:
    return controller.findings(run, state, state, seen, returned=False)


def test_only_what_is_known_has_a_name() -> None:
    found = Findings(np.array([1.0, math.nan]), np.array([math.nan, 2.0]), {1: (0.5, 0.25)})
    assert found.by_name(["lr/0", "wd"]) == {
        "slopes": {"lr/0": 1.0},
        "errors": {"wd": 2.0},
        "posterior": {"wd": [0.5, 0.25]},
        "judgement": None,
    }
    assert Findings(np.full(1, math.nan), np.full(1, math.nan)).by_name(["lr/0"]) == {
        "slopes": {},
        "errors": {},
        "posterior": None,
        "judgement": None,
    }


def test_slopes_from_gradients_are_told_with_their_errors() -> None:
    controller = HypergradientController()
    seen = dataclasses.replace(
        observe([1, 2, 3, 4], fan(4, 2)), slopes=np.array([-2.0, 0.0]), errors=np.array([0.5, math.inf])
    )
    found = findings(controller, RUN, controller.start(2), seen).by_name(["lr/0", "wd"])
    assert found == {"slopes": {"lr/0": -2.0}, "errors": {"lr/0": 0.5}, "posterior": None, "judgement": None}
    without = findings(controller, RUN, controller.start(2), observe([1, 2, 3, 4], fan(4, 2)))
    assert without.by_name(["lr/0", "wd"])["slopes"] == {}


def line(slope: float, noise: float, step: int, replicas: int = 8) -> Observation:
    """Return a sync whose losses lie on a line in the logarithm of one learning rate, up to alternating noise."""
    multipliers = np.linspace(0.7, 1.3, replicas)[None]
    losses = 2.0 + slope * np.log(multipliers[0]) + noise * np.array([1.0, -1.0] * (replicas // 2))
    return Observation(losses, multipliers, np.array([0.1]), step)


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_slopes_from_losses_are_those_of_the_line_and_errors_those_of_its_residual(noise: float) -> None:
    run = RegressionController(trust=10.0).prepare(Run(1000, 25, 0.3, (None,), (0.1,), probed=False, gradients="local"))
    controller = RegressionController(trust=10.0)
    seen = line(-0.8, noise, 100)
    state = controller.update(run, controller.start(1, run), seen)
    found = findings(controller, run, state, seen)
    x = np.log(seen.multipliers[0])
    expected = noise / math.sqrt(len(x) * x.var())
    assert found.slopes[0] == pytest.approx(-0.8, abs=3 * expected)
    assert 0.5 * expected < found.errors[0] < 2 * expected
    assert state == controller.update(run, controller.start(1, run), seen), "telling changes nothing"


def test_the_posterior_is_told_where_the_learning_rate_is_not_trusted() -> None:
    for trust, told in ((3.0, False), (10.0, True)):
        controller = RegressionController(trust=trust)
        run = controller.prepare(Run(1000, 25, 0.3, (None,), (0.1,), probed=False, gradients="local"))
        state = controller.start(1, run)
        means = []
        for step in range(75, 201, 25):
            seen = line(-0.8, 0.01, step)
            state = controller.update(run, state, seen)
            found = findings(controller, run, state, seen)
            assert bool(found.posterior) is told
            means += [found.posterior[0]] if told else []
        assert means == sorted(means), "every slope that asks for more moves it up"
        assert all(mean > 0 and 0.3 < deviation < 2 for mean, deviation in means)


def test_a_sync_without_any_finite_loss_has_no_slope() -> None:
    controller = RegressionController(trust=10.0)
    run = controller.prepare(Run(1000, 25, 0.3, (None,), (0.1,), probed=False, gradients="local"))
    seen = dataclasses.replace(line(-0.8, 0.01, 100), losses=np.full(8, np.nan))
    found = findings(controller, run, controller.start(1, run), seen).by_name(["lr/0"])
    assert found["errors"] == {}
    assert found["slopes"] == {}


def test_which_controllers_tell() -> None:
    assert isinstance(RegressionController(), ExplainingController)
    assert isinstance(HypergradientController(), ExplainingController)
    assert not isinstance(SoftmaxController(), ExplainingController)


def level(loss: float, step: int) -> Observation:
    """Return a sync at which all replicas have one loss."""
    return dataclasses.replace(line(0.0, 0.0, step), losses=np.full(8, loss))


def test_reasons_have_the_numbers_that_decided() -> None:
    controller = RegressionController()
    run = controller.prepare(Run(1000, 25, 0.3, (None,), (0.1,), probed=False, gradients="local"))
    state = controller.start(1, run)
    for step, loss in ((25, 4.0), (50, 3.0), (75, 2.9), (100, 2.8), (125, 6.0)):
        before, state = state, controller.update(run, state, level(loss, step))
        found = controller.findings(run, before, state, level(loss, step), returned=False)
        assert found.judgement["level"] == loss
    seen = level(5.5, 150)
    assert controller.broke(run, state, seen)
    after = controller.begun_anew(run, state, seen)
    found = controller.findings(run, state, after, seen, returned=True)
    assert found.judgement["lowest"] == 2.8
    assert found.judgement["gain"] == pytest.approx(1.2)
    assert found.judgement["last"] == 6.0
    for number in ("5.5 after 6;", "lowest 2.8", "gain so far 1.2", "usual change 0.55"):
        assert number in found.why
    assert controller.factors(after) == pytest.approx([1 / controller.settings.cut])


def test_a_doubt_and_a_comparison_name_their_numbers() -> None:
    controller, constants = RegressionController(), RegressionSettings()
    run = controller.prepare(Run(1000, 25, 0.3, (None,), (0.1,), probed=False, gradients="shared"))
    state = controller.start(1, run)

    def seen_at(step: int, slope: float) -> Observation:
        return dataclasses.replace(level(400.0 / step, step), slopes=np.array([slope]), errors=np.array([1.0]))

    for step in range(25, 126, 25):
        assert not controller.doubts(run, state, seen_at(step, 0.75))
        state = controller.update(run, state, seen_at(step, 0.75))
    seen = seen_at(150, 0.75)
    assert controller.doubts(run, state, seen)
    trial = controller.tried(run, state, seen)
    found = controller.findings(run, state, trial, seen, returned=True)
    assert (found.judgement["slope"], found.judgement["level"]) == pytest.approx((0.75, 400 / 150))
    for number in ("they are 0.75 standard errors", "of 5 syncs", f"below {constants.doubt_mean:.2g}", "loss 2.667"):
        assert number in found.why
    assert trial["trial"] == {"step": 150, "level": pytest.approx(44 / 15), "noise": pytest.approx(7 / 15)}
    rest, state = controller.prepare(run.rest(150)), trial
    for step in range(25, 126, 25):
        state = controller.update(rest, state, seen_at(step, -3.0))
    assert controller.worse(rest, state, seen_at(150, -3.0))
    found = controller.findings(rest, state, trial, seen_at(150, -3.0), returned=True)
    assert found.why == (
        "the lower learning rate is no better after 150 steps (mean loss 2.933, where it was 2.933; noise 0.47)"
    )


def test_a_repr_names_what_differs_from_the_defaults() -> None:
    assert repr(RegressionController()) == "RegressionController()"
    assert repr(SoftmaxController(scale=0.5)) == "SoftmaxController(scale=0.5)"
    changed = RegressionController(trust=10.0, settings=RegressionSettings(cut=4.0))
    assert repr(changed) == "RegressionController(settings=RegressionSettings(cut=4.0), trust=10.0)"
    assert eval(repr(changed)) == changed
