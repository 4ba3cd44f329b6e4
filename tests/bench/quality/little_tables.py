"""Random examples in the form of the tables, rankings and series of the quality suite."""

from __future__ import annotations

import numpy as np

from bench.quality.data.source import Arrays


def little_tables() -> dict[str, Arrays]:
    """Return a few hundred rows of each data set by its name."""
    random = np.random.default_rng(1)
    sizes = [9, 52, 47, 17, 3, 7, 24, 15, 5, 10, 2, 3, 6, 8, 6, 6, 51, 37, 8, *[4] * 14]
    return {
        "census": {
            "categories": random.integers(sizes, size=(400, len(sizes))).astype(np.uint8),
            "numbers": random.integers(100, size=(400, 7)).astype(np.int32),
            "rich": random.integers(2, size=400).astype(np.uint8),
            "unseen": (np.arange(400) >= 300).astype(np.uint8),
        },
        "credit": {
            "categories": random.integers(4, size=(100, 13)).astype(np.uint8),
            "numbers": random.integers(100, size=(100, 7)).astype(np.int16),
            "bad": random.integers(2, size=100).astype(np.uint8),
        },
        "diamonds": {
            "categories": random.integers([5, 7, 8], size=(300, 3)).astype(np.uint8),
            "numbers": random.random((300, 6)).astype(np.float32),
            "price": random.integers(326, 18823, size=300).astype(np.int16),
        },
        "queries": {
            "features": random.standard_normal((400, 136)).astype(np.float16),
            "relevance": random.integers(5, size=400).astype(np.uint8),
            "query": (np.arange(400) // 25).astype(np.int16),
        },
        "weather": {"weather": (50 + 10 * random.standard_normal((3, 12 * 7 * 24, 8))).astype(np.float32)},
    }
