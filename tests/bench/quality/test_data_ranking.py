"""Parsing documents to rank."""

from __future__ import annotations

import numpy as np
import pytest

from bench.quality.data.ranking import parse_queries


def test_queries_are_parsed() -> None:
    """Queries of both files keep apart even if their numbers are the same; features become logarithms."""
    files = {
        "msn1.fold1.test.5k.txt": b"0 qid:1 1:0 2:-1\n",
        "msn1.fold1.train.5k.txt": b"2 qid:1 1:3 2:0 \n4 qid:7 1:1000000 2:0 \n",
        "msn1.fold1.vali.5k.txt": b"no",
    }
    found = parse_queries(iter(files.items()))
    assert found["relevance"].tolist() == [0, 2, 4]
    assert found["query"].tolist() == [0, 1, 2]
    expected = np.log([[1, 0.5], [4, 1], [1_000_001, 1]])
    assert found["features"] == pytest.approx(expected, rel=1e-3)
