"""Format the records of ``test_memory.py`` as a table."""

from __future__ import annotations

from bench import records
from bench.comparison_table import NOTHING, TITLES
from bench.markdown import section_text, table_lines
from bench.records import Entry

# Phases of a record, with the titles of their columns.
PHASES = {
    "built": "construction",
    "first step": "first step",
    "step": "later step",
    "loaded": "`load_state_dict`",
    "step after it": "step after loading",
}


def section(found: list[Entry]) -> str:
    """Return the section of the suite's entries on one device."""
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
        cells = [params["mode"], TITLES[params["way"]], f"{info['held B a parameter']:.2f}", *peaks]
        body.append([*cells, NOTHING if ratio is None else f"{ratio:.3f}"])
    millions = found[0]["extra_info"]["parameters"] / 1e6
    description = (
        f"Bytes a parameter of {millions:.1f} M that torch's allocator holds: parameters, gradients, optimizer state "
        "and temporaries, after a step and at the peak of each phase. While the optimizer is built and while a "
        "checkpoint is loaded there are no gradients, except fixed ones. The checkpoint is in host memory"
        + (", which is counted here. " if records.device_of(found[0]) == "cpu" else ". ")
        + "The ratio is the peak of our step over the lower peak of torch's two."
    )
    header = ["optimizer", "", "held", *PHASES.values(), "ours / torch"]
    return section_text("Memory", description, records.sources(found), table_lines(header, body, left=2))


def _least(found: list[Entry]) -> dict[str, float]:
    """Return the lowest peak of torch's steps, by mode."""
    least: dict[str, float] = {}
    for entry in found:
        if entry["params"]["way"].startswith("torch-"):
            mode, peak = entry["params"]["mode"], entry["extra_info"]["peak B a parameter"]["step"]
            least[mode] = min(peak, least.get(mode, peak))
    return least
