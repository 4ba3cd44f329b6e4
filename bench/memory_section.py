"""The table of what ``test_memory.py`` recorded."""

from __future__ import annotations

import records
from cost_model import grid
from layout import NOTHING, WAYS
from records import Entry

#: The phases of a record, and what their columns are called.
PHASES = {
    "built": "building it",
    "first step": "first step",
    "step": "a step",
    "loaded": "`load_state_dict`",
    "step after it": "a step after it",
}


def section(found: list[Entry]) -> str:
    """Of the suite's entries on one device."""
    found = [entry for entry in found if "held B a parameter" in entry["extra_info"]]
    if not found:
        return ""
    modes = list(dict.fromkeys(entry["params"]["mode"] for entry in found))
    found = sorted(found, key=lambda entry: modes.index(entry["params"]["mode"]))
    least = _least(found)
    body = []
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        peaks = [f"{info['peak B a parameter'][phase]:.2f}" for phase in PHASES]
        known = least.get(params["mode"])
        ratio = info["peak B a parameter"]["step"] / known if known and params["way"].startswith("hdet-") else None
        cells = [params["mode"], WAYS[params["way"]], f"{info['held B a parameter']:.2f}", *peaks]
        body.append([*cells, NOTHING if ratio is None else f"{ratio:.3f}"])
    millions = found[0]["extra_info"]["parameters"] / 1e6
    title = (
        f"**Memory in bytes a parameter** of {millions:.1f} M: parameters, gradients, state and temporaries that "
        "torch's allocator has handed out, measured: what stays after a step, and the peaks. There are no gradients "
        "yet (but fixed ones) while the optimizer is built and while a checkpoint is loaded"
        + (", which counts too. " if records.device_of(found[0]) == "cpu" else " from the host's memory. ")
        + "The ratio is of our step's peak to the lower of torch's two."
    )
    header = ["work", "", "held", *PHASES.values(), "ours / torch"]
    return "\n".join([title, records.sources(found), "", *grid(header, body, left=2)])


def _least(found: list[Entry]) -> dict[str, float]:
    """By mode, the lowest peak of a step of torch's."""
    least: dict[str, float] = {}
    for entry in found:
        if entry["params"]["way"].startswith("torch-"):
            mode, peak = entry["params"]["mode"], entry["extra_info"]["peak B a parameter"]["step"]
            least[mode] = min(peak, least.get(mode, peak))
    return least
