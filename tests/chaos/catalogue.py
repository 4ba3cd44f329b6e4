"""All faults by name."""

from __future__ import annotations

from tests.chaos import (
    faults_calls,
    faults_checkpoints,
    faults_collectives,
    faults_differences,
    faults_processes,
    faults_values,
)
from tests.chaos.faults import Fault, by_name

FAULTS: dict[str, Fault] = by_name(
    (
        *faults_values.FAULTS,
        *faults_differences.FAULTS,
        *faults_processes.FAULTS,
        *faults_calls.FAULTS,
        *faults_collectives.FAULTS,
        *faults_checkpoints.FAULTS,
    )
)
