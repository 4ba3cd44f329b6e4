"""Measure the copy bandwidth and the launch time of the machine, which all times are compared with."""

from __future__ import annotations

import statistics
import subprocess
from typing import Any

import torch

from bench import measure

# Sizes of the copies in MiB; all are many times the size of the caches.
COPIES = {"cuda": (512, 1024, 4096), "cpu": (64, 256)}

# Results of this process, by device. They are recorded under the key ``yardsticks``.
measured: dict[str, dict[str, Any]] = {}

_GPU_STATE = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def measure_once(device: str) -> dict[str, Any]:
    """Return the limits of a device, measured at the first call.

    ``copy B/s`` counts bytes read and bytes written. It is the median of the fastest of several sizes.
    """
    if device not in measured:
        copies = {
            f"{mebibytes} MiB": _copy(device, mebibytes) for mebibytes in COPIES[device][: 1 if measure.QUICK else None]
        }
        fastest = max(copies, key=lambda size: copies[size])
        measured[device] = {
            "copy B/s": copies[fastest],
            "copied": fastest,
            "copies B/s": copies,
            "launch us": _launch(device),
        }
        if device == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            uuid = str(getattr(properties, "uuid", ""))  # not in every torch
            measured[device] |= {"L2 bytes": properties.L2_cache_size, "under load": _gpu_state(uuid)}
    return measured[device]


def share(moved: int, seconds: float, device: str, held: int) -> dict[str, Any]:
    """Return ``moved`` bytes in ``seconds`` as a share of the copy bandwidth.

    ``cached`` in the result is True where the working set of ``held`` bytes may fit into the L2 cache in part.
    """
    known = measure_once(device)
    bandwidth: float = known["copy B/s"]
    return {"bytes": moved, "share": moved / seconds / bandwidth, "cached": held < 2 * known.get("L2 bytes", 0)}


def report(benchmark: Any, device: str, *, moved: int, held: int) -> None:
    """Record and print the median time of ``benchmark`` and its share of the copy bandwidth."""
    if benchmark.stats is None:  # --benchmark-disable
        return
    stats = benchmark.stats.stats
    found = share(moved, stats.median, device, held)
    benchmark.extra_info |= {"ms": stats.median * 1e3, "best ms": stats.min * 1e3, "spread": stats.iqr / stats.median}
    benchmark.extra_info |= found
    print(
        f"\n{benchmark.name}: {stats.median * 1e3:.4f} ms (best {stats.min * 1e3:.4f}), {found['share']:.1%} of a copy"
    )


def _copy(device: str, mebibytes: int) -> float:
    source = torch.ones(mebibytes * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(measure.sample(lambda: target.copy_(source), device, 0.4))


def _launch(device: str) -> dict[str, float]:
    """Return the µs of an almost empty kernel: each of many in a series, and one until it is done."""
    little = torch.zeros(1, device=device)

    def launch() -> None:
        little.add_(1)

    in_a_row = measure.sample(launch, device, 0.1)
    alone = measure.host_times(measure.until_done(launch, device), device, 100)
    return {"in a row": statistics.median(in_a_row) * 1e6, "alone": statistics.median(alone) * 1e6}


def _gpu_state(uuid: str) -> dict[str, str] | None:
    """Return driver, clocks and power limit by nvidia-smi while the GPU copies, or None where that fails."""
    source = torch.ones(2**30, device="cuda")
    target = torch.empty_like(source)
    for _ in range(400):  # most of a second
        target.copy_(source)
    query = ["nvidia-smi", f"--query-gpu=uuid,{','.join(_GPU_STATE)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        torch.cuda.synchronize()
    lines = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
    complete = [line for line in lines if len(line) == 1 + len(_GPU_STATE)]
    own = [line for line in complete if line[0].endswith(uuid)] or complete
    return dict(zip(_GPU_STATE, own[0][1:], strict=True)) if own else None
