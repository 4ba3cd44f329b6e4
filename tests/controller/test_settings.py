"""The constants of the controllers: every one is read, saved and compared, and none hides in a module."""

from __future__ import annotations

import ast
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels import controller as package
from hdet_kernels.controller import RegressionSettings, SlopeSettings, SoftmaxSettings
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.regression import Soundness
from tests.controller.cases import fan
from tests.controller.scripted import Scripted

CONTROLLERS = [hk.RegressionController, hk.HypergradientController, hk.SoftmaxController]
MODULES = [
    path for path in Path(package.__file__).parent.glob("*.py") if path.name not in ("settings.py", "__init__.py")
]

READ: set[str] = set()


class Recording(RegressionSettings):
    """Settings that record the names of the fields that are read."""

    # By identity: comparing or hashing fields would read all of them.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __getattribute__(self, name: str) -> Any:
        READ.add(name)
        return super().__getattribute__(name)


def one_sync(controller: hk.RegressionController, run: Run, changes: dict[str, Any]) -> None:
    """Update a changed first state once, by losses of eight replicas on which a smaller value looks better."""
    rho = fan(8, 1)
    state = controller.start(1, run) | changes
    controller.update(run, state, Observation(1.0 + 0.05 * np.log(rho[0]), rho, np.full(1, 0.3), 150))


def test_every_field_is_read() -> None:
    """Scripted runs that reach every rule: with a probe and without, tried, broken, and other scalars."""
    recording = Recording()
    READ.clear()
    for trust in (3.0, None):
        controller = hk.RegressionController(settings=recording, trust=trust)
        Scripted([0.1], "constant", noise=0.0, controller=controller).finish()
        Scripted([100.0], probed=False, sync_every=50, gradients="local", controller=controller).finish()
        Scripted([100.0], sync_every=50, controller=controller).finish()
        run, seen = Run(1000, 10, 0.3, (None,), (1.0,)), Observation(np.ones(8), fan(8, 1), np.ones(1), 20)
        controller.begun_anew(run, controller.start(1, run), seen)
        course = Soundness(3.0, 1.0, 1.0, (0.1,), slopes=-6.0, count=6).state_dict()
        trial = {"step": 20, "level": 1.0, "noise": 1.0}
        assert controller.worse(run, controller.start(1, run) | {"soundness": course, "trial": trial}, seen)
    other = controller.prepare(Run(1000, 10, 0.3, (None,), (None,), others=True))
    one_sync(controller, other, {})
    assert {field.name for field in fields(RegressionSettings)} - READ == set()


def changed(value: Any) -> Any:
    return value[:-1] if isinstance(value, tuple) else value + 1 if isinstance(value, int) else value * 0.8 + 0.013


def scheduler(controller: Any) -> hk.HDETOneCycleLR:
    return hk.HDETOneCycleLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 0.1, 20, auto_lr=controller,
                             cycle_momentum=False)  # fmt: skip


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_a_run_does_not_resume_under_another_setting(kind: Any) -> None:
    saved = scheduler(kind()).state_dict()
    scheduler(kind()).load_state_dict(saved)
    settings = kind().settings
    for field in fields(settings):
        value = getattr(settings, field.name)
        other = scheduler(kind(settings=replace(settings, **{field.name: changed(value)})))
        with pytest.raises(ValueError, match="the checkpoint was made with") as error:
            other.load_state_dict(saved)
        plain = [list(each) if isinstance(each, tuple) else each for each in (value, changed(value))]
        expected = f"controller_constants.settings.{field.name}={plain[0]!r}, this scheduler has {plain[1]!r}: build it"
        assert expected in str(error.value)


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_settings_survive_a_file_and_json(kind: Any) -> None:
    state = scheduler(kind()).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    constants = loaded["hdet"][0]["config"]["controller_constants"]
    assert set(constants["settings"]) == {field.name for field in fields(kind().settings)}
    loaded["hdet"][0]["config"] = json.loads(json.dumps(loaded["hdet"][0]["config"]))
    assert loaded["hdet"][0]["config"] == state["hdet"][0]["config"]
    scheduler(kind()).load_state_dict(loaded)


def test_every_default_is_what_was_fitted() -> None:
    """A changed default changes every run: it must be meant."""
    settings = RegressionSettings()
    regression = {field.name: getattr(settings, field.name) for field in fields(settings)}
    assert regression == {
        "begins": 0.0, "moment_weight": 0.1, "largest_move": 0.75, "total_travel": 3.0, "largest_significance": 4.0,
        "largest_slope": 1e150, "warmup_from": 0.04, "warmup_share": 0.3, "early_peak": 0.15, "constant_factor": 3.0,
        "turning_length": 0.5, "task_deviation": 1.2, "sign_error": 0.013, "quantile": 0.26, "least_distrust": 3.0,
        "turned_from": 0.013, "turned_until": 0.036, "turned_mean": 2.0, "turned_count": 6, "doubt_at": 0.135,
        "doubt_mean": 0.4, "better_noise": 1.1, "fall_share": 0.2, "fall_noise": 4.0, "watch_until": 0.6, "cut": 6.0,
        "others_until": 0.9, "others_from": 1 / 3, "outlier_share": 0.25, "outlier_distance": 2.0,
        "bad_loss_margin": 1e-3, "noise_decay": 0.9, "rounding_noise": 1e-5, "rounding_freedom": 20,
        "nonlinearity_weight": 0.5, "sign_decay": 0.5,
    }  # fmt: skip
    assert SlopeSettings() == SlopeSettings(0.05, *list(regression.values())[1:10])
    assert SoftmaxSettings() == SoftmaxSettings(smallest_step=0.01)


#: Literals of formulas: identities, halves, the fewest losses with outliers, percent, and Student's 1/(4ν).
FORMULAS = {0, 1, 2, 3, 0.25, 0.5, 100}
#: Guards against division by zero, overflow and underflow; the tolerance of steps.
GUARDS = {1e-12, 1e-300, 1e9, 50, 1e-6}
#: The paper's run, in paper_settings(), and sizes of tables.
OWN = {"softmax": {9, 100_000}, "regression": {6.0, 121, 8, 5}}
#: Assignments of modules: the tolerance, the logger, and sizes of tables that no result depends on.
ASSIGNED = {
    "STEP_TOLERANCE = 1e-06",
    "log = logging.getLogger('hdet_kernels')",
    "GRID_REACH, GRID_POINTS = (6.0, 121)",
    "CHANGES, BENDS = (8, 5)",
}


def numbers_in(path: Path) -> set[float]:
    """Return the numeric literals of a module, without those that are defaults of a controller's arguments."""
    tree = ast.parse(path.read_text())
    arguments = [
        entry.value
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and entry.value is not None
    ]
    left_out = {id(part) for value in arguments for part in ast.walk(value)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and id(node) not in left_out
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_constant_hides_in_a_module(path: Path) -> None:
    allowed = FORMULAS | GUARDS | OWN.get(path.stem, set())
    assert numbers_in(path) - allowed == set()


def test_the_scan_finds_a_hidden_constant(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("class A:\n    b: float = 0.7\n    def c(self, d=0.3): return 1.7 * self.b - -0.2\n")
    assert numbers_in(module) == {0.3, 1.7, 0.2}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_hold_no_constants_and_make_no_settings(path: Path) -> None:
    """Settings come from the controller alone: a module that made its own would ignore the user's."""
    tree = ast.parse(path.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    values = {ast.unparse(node) for node in assigned if not isinstance(node.value, ast.Subscript)}
    assert values <= ASSIGNED
    made = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"SlopeSettings", "RegressionSettings", "SoftmaxSettings"} & set(made)
