"""Results files."""

from __future__ import annotations

import json

from bench.quality.results import Report, joined
from tests.bench.quality.scripted import scripted


def test_continued_run_knows_finished_jobs_and_names_their_sources() -> None:
    first = scripted({0.1: (2.0, 1.25)})
    job = {"kind": "start", "task": "digits", "spec": {"method": "hdet", "lr": 0.1, "seed": 1}, "factor": 0.1}
    others = [{**job, "spec": job["spec"] | other} for other in ({"seed": 2}, {"lr": 0.2}, {"method": "PBT"})]
    assert first.lacking([job, *others]) == others
    assert Report(**json.loads(json.dumps(first.plain()))).lacking([job]) == []
    again = Report("other", "machine", "later", 2.0, "ci", first.best, first.records, first.sources)
    assert [line.split(",")[0] for line in again.sources] == ["`command`", "`other`"]
    assert f"{len(first.records)} runs in all" in again.sources[-1]


def test_failed_run_is_recorded_with_its_spec() -> None:
    spec = {"task": "digits", "method": "hdet", "lr": 0.1, "seed": 1}
    job = {"kind": "start", "task": "digits", "spec": spec, "factor": 0.1}
    report = Report("command", "machine", "date", 1.0, "ci", {}, [{**job, "error": "raised"}])
    assert report.plain()["records"] == [{"kind": "start", "factor": 0.1, "error": "raised", **spec}]
    assert report.lacking([job]) == [job]


def test_files_of_one_size_are_joined() -> None:
    first, second = scripted({0.1: (2.0, 1.25)}), scripted({10.0: (2.0, 1.25)})
    both = joined([first, second])
    assert both.records == [*first.records, *second.records]
    assert len(both.sources) == 2
    assert joined([first]) is first
