"""Tasks: data, model, loss and length of a run.

protocol.py   interface of a task, and what tasks share
images.py     tasks on images
text.py       on text
tables.py     on tables
census.py     on the table of the census
ranking.py    on items to rank
series.py     on time series
"""

from __future__ import annotations

from bench.quality.tasks.images import IMAGE_TASKS
from bench.quality.tasks.protocol import Batch, Task
from bench.quality.tasks.ranking import RANKING_TASKS
from bench.quality.tasks.sequences import SERIES_TASKS, TEXT_TASKS
from bench.quality.tasks.tables import CENSUS_TASKS, TABLE_TASKS

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (*TABLE_TASKS, *CENSUS_TASKS, *RANKING_TASKS, *SERIES_TASKS, *TEXT_TASKS, *IMAGE_TASKS)
}

__all__ = ["TASKS", "Batch", "Task"]
