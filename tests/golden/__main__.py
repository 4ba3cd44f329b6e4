"""Write the checkpoints of this version: ``python -m tests.golden``. Files that exist are left as they are."""

from __future__ import annotations

import sys

import torch

import hdet_kernels as hk
from tests.golden import cases
from tests.golden.files import path_of
from tests.ranks import Cases


def main() -> None:
    torch.set_num_threads(1)
    missing = [name for name in cases.CASES if not path_of(hk.__version__, name).exists()]
    together = [name for name in missing if cases.CASES[name].ranks > 1]
    by_rank = Cases(cases.RANKS, cases.made, {name: (name,) for name in together})
    found = {name: by_rank[name] if name in together else [cases.made(0, name)] for name in missing}
    for name, ranks in found.items():
        path = path_of(hk.__version__, name)
        path.parent.mkdir(exist_ok=True)
        torch.save({"version": hk.__version__, "ranks": ranks}, path)
        print(path.name, path.stat().st_size, file=sys.stderr)


if __name__ == "__main__":
    main()
