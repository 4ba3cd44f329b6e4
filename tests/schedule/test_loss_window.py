"""The losses since the last sync: summed in float64 on their own device, without keeping them."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels.schedule.losses import LossWindow

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
    def test_starts_empty(self) -> None:
        assert shown(LossWindow()) == (0.0, 0, False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
    def test_tensors_are_summed_as_float64_on_their_device(self, dtype: torch.dtype) -> None:
        window = filled(torch.tensor(2, dtype=dtype), torch.tensor(3, dtype=dtype))
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
    @given(st.lists(st.tuples(losses, st.sampled_from(["float", "float64", "float32", "int"])), max_size=12))
    def test_numbers_and_tensors_mix(self, entries: list[tuple[float, str]]) -> None:
        window, total = LossWindow(), Fraction(0)
        for value, kind in entries:
            if kind == "float":
                entry: Any = value
            elif kind == "int":
                entry = int(value)
            else:
                entry = torch.tensor(value, dtype=getattr(torch, kind))
            window.record(entry)
            total += Fraction(float(entry))
        assert window.count == len(entries)
        assert window.ever is bool(entries)
        assert float(window.sum) == pytest.approx(float(total), rel=1e-12, abs=1e-8)

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_a_tensor_of_one_element(self, shape: tuple[int, ...]) -> None:
        window = filled(torch.full(shape, 2.0), torch.full(shape, 3.0))
        assert shown(window) == (5.0, 2, True)
        assert window.sum.shape == ()

    @pytest.mark.parametrize("value", [np.float32(2.5), np.float64(2.5), np.array(2.5)], ids=lambda v: type(v).__name__)
    def test_numpy_scalars(self, value: Any) -> None:
        assert shown(filled(value)) == (2.5, 1, True)

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
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


REFUSED = {
    "three losses": (
        torch.ones(3),
        ValueError,
        r"a scalar, got a tensor of shape \(3,\); reduce it first, as in .mean\(\)",
    ),
    "empty tensor": (torch.ones(0), ValueError, r"shape \(0,\)"),
    "column": (torch.ones(2, 1), ValueError, r"shape \(2, 1\)"),
    "no values": (torch.ones((), device="meta"), ValueError, "a dense tensor with values, got a tensor .* on meta"),
    "sparse": (torch.ones(1).to_sparse(), ValueError, "a dense tensor with values, got .* torch.sparse_coo"),
    "flags": (torch.tensor(True), TypeError, "must be real, got torch.bool"),
    "complex tensor": (torch.tensor(1j), TypeError, "must be real, got torch.complex64"),
    "None": (None, TypeError, "must be a number or a scalar tensor, got None"),
    "string": ("2.5", TypeError, "must be a number or a scalar tensor, got '2.5'"),
    "flag": (True, TypeError, "must be a number or a scalar tensor, got True"),
    "list": ([1.0, 2.0], TypeError, "must be a number or a scalar tensor, got list"),
    "complex": (1j, TypeError, "must be a number or a scalar tensor, got complex"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("start", [(), (1.5,), (torch.tensor(1.5),)], ids=["empty", "number", "tensor"])
def test_wrong_losses_raise_and_change_nothing(start: tuple[Any, ...], case: str) -> None:
    loss, error, message = REFUSED[case]
    window = filled(*start)
    before = shown(window)
    with pytest.raises(error, match=message):
        window.record(loss)
    assert shown(window) == before


KINDS = [float, torch.tensor]


@pytest.mark.parametrize("kind", KINDS, ids=["numbers", "tensors"])
class TestMoments:
    def test_clear_keeps_only_that_there_were_losses(self, kind: Any) -> None:
        window = filled(kind(1.5), kind(2.0))
        window.clear()
        assert shown(window) == (0.0, 0, True)
        window.record(kind(3.0))
        assert shown(window) == (3.0, 1, True)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_clear_removes_non_finite_losses(self, kind: Any, bad: float) -> None:
        window = filled(kind(bad))
        window.clear()
        window.record(kind(2.0))
        assert float(window.sum) == 2.0

    def test_clear_before_anything(self, kind: Any) -> None:
        window = LossWindow()
        window.clear()
        assert shown(window) == (0.0, 0, False)

    def test_reset_comes_back_to_the_mark(self, kind: Any) -> None:
        window = filled(kind(1.5), kind(2.0))
        mark = window.mark()
        window.record(kind(10.0))
        window.clear()
        window.record(kind(20.0))
        window.reset(mark)
        assert shown(window) == (3.5, 2, True)
        window.record(kind(1.0))
        assert shown(window) == (4.5, 3, True)

    def test_reset_to_the_beginning(self, kind: Any) -> None:
        window = LossWindow()
        mark = window.mark()
        window.record(kind(10.0))
        window.reset(mark)
        assert shown(window) == (0.0, 0, False)

    def test_a_mark_of_an_empty_window_that_had_losses(self, kind: Any) -> None:
        window = filled(kind(10.0))
        window.clear()
        mark = window.mark()
        window.record(kind(5.0))
        window.reset(mark)
        assert shown(window) == (0.0, 0, True)


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

    def test_is_plain(self) -> None:
        state = filled(torch.tensor(1.5), 2.0).state_dict()
        assert state == {"sum": 3.5, "count": 2, "ever": True}
        assert [type(value) for value in state.values()] == [float, int, bool]

    def test_of_an_empty_window(self) -> None:
        window = filled(1.0)
        window.load_state_dict(LossWindow().state_dict())
        assert shown(window) == (0.0, 0, False)

    def test_is_a_copy(self) -> None:
        window = filled(torch.tensor(1.5))
        state = window.state_dict()
        window.record(torch.tensor(1.0))
        assert state["sum"] == 1.5


def test_a_mark_can_be_used_again() -> None:
    window = LossWindow()
    window.record(torch.tensor(1.0))
    mark = window.mark()
    for _ in range(2):
        window.record(torch.tensor(5.0))
        window.reset(mark)
        assert (float(window.sum), window.count) == (1.0, 1)
