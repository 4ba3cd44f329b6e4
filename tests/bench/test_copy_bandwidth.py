"""Share of the copy bandwidth."""

from __future__ import annotations

import pytest

from bench import copy_bandwidth


def test_share_of_the_copy_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copy_bandwidth.measured, "cuda", {"copy B/s": 1000.0, "L2 bytes": 100})
    assert copy_bandwidth.share(500, 1.0, "cuda", held=300) == {"bytes": 500, "share": 0.5, "cached": False}
    assert copy_bandwidth.share(500, 2.0, "cuda", held=199)["cached"] is True
