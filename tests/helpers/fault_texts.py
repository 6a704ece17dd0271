"""Compares texts with the expected texts in a file. ``COMPOSABLE_FSDP_GOLDEN=write`` rewrites the file. Placeholders
replace the parts that vary between runs: ``P`` is a process, ``N`` a number of operations or steps, ``T`` a time, and
``...`` a message of gloo or the system."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

FAULTS = Path(__file__).with_name("fault_texts.txt")
VARIABLE = "COMPOSABLE_FSDP_GOLDEN"

_HEADING = re.compile(r"^=== (.*)$", re.MULTILINE)
_CHANGING = {
    r"(?<=process )\d+": "P",
    r"(?<=operation )\d+": "N",
    r"\d+ steps? done": "N steps done",
    r"\b\d+(\.\d+)?(?= s\b)": "T",
    r"(?<=alloc_cpu\.cpp:)\d+\][^.]*": "N]",
    r"(?<=gloo says: ).*": "...",
    r"(?<=[a-z] )\d+(?= \(\d+ bytes)": "N",
    # Reported if the rank has waited for a second before, as on a busy machine.
    r"\n  rank \d+ last took part in .*\(operation N of .*(?=\n  rank \d+ last took .*, and closed its)": "",
}


def normalised(text: str) -> str:
    for pattern, letter in _CHANGING.items():
        text = re.sub(pattern, letter, text, flags=re.IGNORECASE)
    return text


def read_golden() -> dict[str, str]:
    """Return the expected texts by name."""
    sections = _HEADING.split(FAULTS.read_text()) if FAULTS.exists() else [""]
    return {name: text.strip("\n") for name, text in zip(sections[1::2], sections[2::2], strict=True)}


def assert_golden(name: str, text: str) -> None:
    known, now = read_golden(), normalised(text)
    if os.environ.get(VARIABLE) == "write":
        known[name] = now
        FAULTS.write_text("\n".join(f"=== {key}\n{value}\n" for key, value in sorted(known.items())))
        return
    before = known.get(name, "")
    difference = "\n".join(difflib.unified_diff(before.split("\n"), now.split("\n"), "golden", "now", lineterm=""))
    assert now == before, f"the text of {name!r} differs; {VARIABLE}=write accepts the new one:\n{difference}"
