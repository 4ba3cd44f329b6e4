"""Running a state machine of hypothesis: sequences of its operations, the same in every run."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def explore(make: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run ``examples`` sequences of ``steps`` operations each, on a new machine every time."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failing sequence is short enough without shrinking, which takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(make, settings=chosen)
