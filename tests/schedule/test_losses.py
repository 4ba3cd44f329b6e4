"""The losses since the last sync: summed in float64 on their own device; and losses that are equal by mistake."""

from __future__ import annotations

import gc
import json
import math
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet_kernels as hk
from hdet_kernels.schedule.losses import EqualLosses, LossWindow
from tests.ranks import Cases
from tests.schedule.checkpoints import Logged
from tests.training import Trainer

PROPERTY = settings(deadline=None, max_examples=60)
losses = st.floats(-1e6, 1e6)


def filled(*values: float | torch.Tensor) -> LossWindow:
    window = LossWindow()
    for value in values:
        window.record(value)
    return window


class Unread(torch.Tensor):
    """A tensor whose value must not be asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__)
        return super().__torch_function__(func, types, args, kwargs)


def shown(window: LossWindow) -> tuple[float, int, bool]:
    return float(window.sum), window.count, window.ever


class TestRecord:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_tensors_are_summed_as_float64_on_their_device(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        window = filled(torch.full(shape, 2, dtype=dtype), torch.full(shape, 3, dtype=dtype))
        assert isinstance(window.sum, torch.Tensor)
        assert (window.sum.dtype, window.sum.shape, window.sum.device.type) == (torch.float64, (), "cpu")
        assert shown(window) == (5.0, 2, True)

    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_the_parts_of_a_loss_count_as_one(self, kind: Any) -> None:
        window = filled(kind(5.0))
        for part in (1.0, 2.0, 3.0, 1.0):
            window.record(kind(part), 4)
        assert shown(window) == (12.0, 2, True)
        window.record(kind(3.0), 2)  # one of two: as if it had been recorded before the division
        assert shown(window) == (15.0, 2.5, True)

    def test_the_sum_is_not_rounded_to_the_dtype_of_the_losses(self) -> None:
        window = filled(*[torch.tensor(256.0, dtype=torch.bfloat16)] * 100, torch.tensor(1.0, dtype=torch.bfloat16))
        assert float(window.sum) == 25601.0
        small = float(torch.tensor(1e-3))
        window = filled(torch.tensor(1e6), *[torch.tensor(1e-3)] * 100)
        assert float(window.sum) == pytest.approx(1e6 + 100 * small, rel=1e-15)

    @PROPERTY
    @given(st.lists(st.tuples(losses, st.sampled_from(["float", "float64", "float32", "int", "numpy"])), max_size=12))
    def test_numbers_and_tensors_mix(self, entries: list[tuple[float, str]]) -> None:
        window, total = LossWindow(), Fraction(0)
        for value, kind in entries:
            if kind == "float":
                entry: Any = value
            elif kind == "int":
                entry = int(value)
            elif kind == "numpy":
                entry = np.float32(value)
            else:
                entry = torch.tensor(value, dtype=getattr(torch, kind))
            window.record(entry)
            total += Fraction(float(entry))
        assert window.count == len(entries)
        assert window.ever is bool(entries)
        assert float(window.sum) == pytest.approx(float(total), rel=1e-12, abs=1e-8)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_non_finite_losses_stay_in_the_sum(self, bad: float, kind: Any) -> None:
        assert not math.isfinite(float(filled(1.0, kind(bad), 1.0).sum))

    def test_the_recorded_tensor_may_change_later(self) -> None:
        first, second = torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
        window = filled(first, second)
        first.fill_(100)
        second.fill_(100)
        assert float(window.sum) == 5.0
        assert first == 100

    def test_no_graph_is_kept(self) -> None:
        class Token:
            pass

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.token = tokens.pop()
                return 2 * x

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return 2 * gradient

        window = LossWindow()
        tokens = [Token(), Token()]
        alive = [weakref.ref(token) for token in tokens]
        for _ in range(2):
            loss = Doubled.apply(torch.ones((), requires_grad=True))
            window.record(loss)
        del loss
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        assert float(window.sum) == 4.0
        assert not window.sum.requires_grad

    def test_recording_never_asks_the_device_for_a_value(self) -> None:
        loss = torch.ones(()).as_subclass(Unread)
        window = filled(loss, loss, 1.0)
        window.mark()
        window.clear()
        window.record(loss)
        window.record(loss, 2)
        assert window.count == 1.5
        assert isinstance(window.sum, Unread)

    @pytest.mark.gpu
    def test_another_device_takes_over_the_sum(self) -> None:
        window = filled(2.0, torch.tensor(1.0), torch.ones((), device="cuda"))
        assert window.sum.device.type == "cuda"
        assert float(window.sum) == 4.0

    def test_losses_of_inference_mode_do_not_block_later_ones(self) -> None:
        """A tensor that is made in inference mode cannot be changed in place outside of it."""
        window = LossWindow()
        with torch.inference_mode():
            window.record(torch.tensor(1.0))
            mark = window.mark()
        window.record(torch.tensor(2.0))
        assert float(window.sum) == 3.0
        with torch.inference_mode():
            window.reset(mark)
        window.record(torch.tensor(4.0))
        window.clear()
        window.record(torch.tensor(5.0))
        assert float(window.sum) == 5.0


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["numbers", "tensors"])
class TestMoments:
    @pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
    def test_clear_keeps_only_that_there_were_losses(self, kind: Any, value: float) -> None:
        window = LossWindow()
        window.clear()
        assert shown(window) == (0.0, 0, False)
        window.record(kind(value))
        window.clear()
        assert shown(window) == (0.0, 0, True)
        window.record(kind(3.0))
        assert shown(window) == (3.0, 1, True)

    @pytest.mark.parametrize("before", ["nothing", "cleared", "losses"])
    def test_reset_comes_back_to_the_mark_again_and_again(self, kind: Any, before: str) -> None:
        window = filled(*[kind(1.5), kind(2.0)][: 0 if before == "nothing" else 2])
        if before == "cleared":
            window.clear()
        expected, mark = shown(window), window.mark()
        for _ in range(2):
            window.record(kind(10.0))
            window.clear()
            window.record(kind(20.0))
            window.reset(mark)
            assert shown(window) == expected
        window.record(kind(1.0))
        assert shown(window) == (expected[0] + 1.0, expected[1] + 1, True)


class TestState:
    @PROPERTY
    @given(
        st.lists(st.tuples(losses, st.booleans()), max_size=6),
        st.lists(st.tuples(losses, st.booleans()), max_size=6),
        st.sampled_from([torch.float32, torch.float64]),
    )
    def test_a_loaded_window_goes_on_bit_for_bit(
        self, before: list[tuple[float, bool]], after: list[tuple[float, bool]], dtype: torch.dtype
    ) -> None:
        def entry(value: float, tensor: bool) -> Any:
            return torch.tensor(value, dtype=dtype) if tensor else value

        window, loaded = filled(*[entry(*pair) for pair in before]), filled(123.0, torch.tensor(4.0))
        state = json.loads(json.dumps(window.state_dict()))
        loaded.load_state_dict(state)
        for pair in after:
            window.record(entry(*pair))
            loaded.record(entry(*pair))
        assert shown(loaded) == shown(window)

    def test_is_plain_and_a_copy(self) -> None:
        window = filled(torch.tensor(1.5), 2.0)
        state = window.state_dict()
        window.record(torch.tensor(1.0))
        assert state == {"sum": 3.5, "count": 2, "ever": True}
        assert [type(value) for value in state.values()] == [float, int, bool]


# Losses that were averaged over the processes before they were recorded

APART, ALIKE = [[0.1, 0.2, 0.3]], [[0.2, 0.2, 0.2]]
NAN = float("nan")

#: (steps of syncs, losses and values at them): whether it is said.
TABLE: dict[str, tuple[list[int], list[list[float]], list[list[list[float]]], bool]] = {
    "twice": ([5, 10], [[1.0] * 3, [2.0] * 3], [APART] * 2, True),
    "once": ([5, 10], [[1.0] * 3, [2.0, 2.0, 2.0 + 1e-15]], [APART] * 2, False),
    "not in a row": ([5, 10, 15], [[1.0] * 3, [2.0, 2.5, 2.0], [1.0] * 3], [APART] * 3, False),
    "among finite ones": ([5, 10], [[1.0, NAN, 1.0], [2.0, 2.0, np.inf]], [APART] * 2, True),
    "one finite": ([5, 10], [[1.0, NAN, NAN]] * 2, [APART] * 2, False),
    "never recorded": ([5, 10], [[NAN] * 3] * 2, [APART] * 2, False),
    "values alike": ([5, 10, 15], [[1.0] * 3] * 3, [APART, ALIKE, ALIKE], False),
    "after single steps": ([1, 2, 3, 4], [[1.0] * 3] * 4, [APART] * 4, False),
    "one value apart": ([5, 10], [[1.0] * 3] * 2, [[*ALIKE, *APART]] * 2, True),
}


@pytest.mark.parametrize(("steps", "losses", "values", "said"), TABLE.values(), ids=TABLE)
def test_by_a_table(steps: Any, losses: Any, values: Any, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualLosses()
    for step, loss, value in zip(steps, losses, values, strict=True):
        watch.check(step, np.array(loss), np.array(value), "the losses")
    assert ("averaged over the processes before it was recorded" in caplog.text) is said


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualLosses()
    for step in range(5, 60, 5):
        watch.check(step, np.ones(3), np.array(APART), "the losses on the probe")
    assert len(caplog.records) == 1


def _equal_warnings(rank: int, reduced: str, options: dict[str, Any]) -> list[str]:
    trainer = Trainer(rank, total_steps=40, sync_every=4, spread=0.5, **options)
    with Logged() as lines:
        for _ in range(16):
            trainer.optimizer.zero_grad()
            loss = trainer.loss()
            loss.backward()
            trainer.optimizer.step()
            loss = loss.detach()
            if reduced == "reduced":
                dist.all_reduce(loss)
            trainer.scheduler.step(loss / 2)
    return [line for line in lines if "equal to the last bit" in line]


def _reduced_probe() -> torch.Tensor:
    loss = torch.rand(())
    dist.all_reduce(loss)
    return loss


CONTROLLED: dict[str, Any] = {"auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0)}
RUNS = Cases(
    2,
    _equal_warnings,
    {
        "reduced": ("reduced", CONTROLLED),
        "own": ("own", CONTROLLED),
        "reduced, nothing reads it": ("reduced", {"auto_lr": False}),
        "reduced, best taken": ("reduced", {"auto_lr": False, "merge": "best"}),
        "reduced probe": ("own", {**CONTROLLED, "probe": _reduced_probe}),
    },
)


@pytest.mark.parametrize("case", RUNS.cases)
def test_an_all_reduced_loss_is_named(case: str) -> None:
    for lines in RUNS[case]:
        said = {"reduced": "the training losses", "reduced, best taken": "the training losses"}
        said["reduced probe"] = "the losses on the probe"
        assert [line.split(" of all")[0] for line in lines] == ([f"step 8: {said[case]}"] if case in said else [])
