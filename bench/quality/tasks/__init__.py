"""Tasks: data, model, loss and length of a run.

protocol.py      interface of a task, and what tasks share
images.py        tasks on images
sequences.py     on text and time series
tables.py        on tables
ranking.py       on items to rank
transformers.py  by transformers, on all of these
"""

from __future__ import annotations

from bench.quality.tasks.images import IMAGE_TASKS
from bench.quality.tasks.protocol import Batch, Task
from bench.quality.tasks.ranking import RANKING_TASKS
from bench.quality.tasks.sequences import SERIES_TASKS, TEXT_TASKS
from bench.quality.tasks.tables import CENSUS_TASKS, TABLE_TASKS
from bench.quality.tasks.transformers import TRANSFORMER_TASKS

TASKS: dict[str, type[Task]] = {
    task.name: task
    for tasks in (
        TABLE_TASKS,
        CENSUS_TASKS,
        RANKING_TASKS,
        SERIES_TASKS,
        TEXT_TASKS,
        IMAGE_TASKS,
        TRANSFORMER_TASKS,
    )
    for task in tasks
}

__all__ = ["TASKS", "Batch", "Task"]
