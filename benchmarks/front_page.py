"""Writes ``docs/generated/front-page.md``, the figures of the documentation's front page, from the newest results.

python benchmarks/front_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "render"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "generated" / "front-page.md"
CASES = {
    "gpt-256": "GPT of 26 M parameters, 256 tokens",
    "gpt-32": "GPT of 26 M parameters, 32 tokens",
    "tiny-200": "200 modules of 4,160 parameters",
    "experts": "4 experts of 194 parameters",
}
PEERS = {"best fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP"}


def _newest(pattern: str) -> Any:
    return json.loads(sorted(ROOT.glob(pattern))[-1].read_text())["rows"]


def _relative(ratio: float) -> str:
    """Return how a step that takes ``ratio`` of another's time compares with it."""
    return f"{1 / ratio:.2f}x faster" if ratio < 1 else f"{ratio:.2f}x slower"


def _table() -> list[str]:
    lines = ["| model | ranks exchange data through | than FSDP2 | than FSDP1 | than DDP |", "|---|---|---|---|---|"]
    for place, name in (("shared memory; the others use gloo", ""), ("sockets, as the others", "-sockets")):
        for row in _newest(f"benchmarks/results/2026-*-step-time-2{name}.json"):
            ratios = [row.get(f"ours/{peer} wall") for peer in PEERS]
            cells = [_relative(ratio["median"]) if ratio else "not measured" for ratio in ratios]
            lines.append(f"| {CASES[row['case']]} | {place} | {' | '.join(cells)} |")
    return lines


def render() -> str:
    """Return the text of the page."""
    step = next(row for row in _newest("benchmarks/results/2026-*-step-time-2.json") if row["case"] == "gpt-256")
    clients = _newest("clients/results/2026-*.json")
    alike = [row for row in clients if row["verdict"].startswith(("same", "rounding"))]
    lines = [
        "::::{grid} 1 1 2 2",
        ":gutter: 2",
        "",
        ":::{grid-item-card} Faster steps",
        ":link: benchmarks",
        ":link-type: doc",
        "",
        f'<p class="number">{_relative(step["ours/best fsdp2 wall"]["median"])}</p>',
        "",
        "than FSDP2: a GPT of 26 M parameters on two CPU ranks of one host. Ours share memory, FSDP2 uses gloo.",
        ":::",
        "",
        ":::{grid-item-card} Runs unchanged",
        ":link: compatibility",
        ":link-type: doc",
        "",
        f'<p class="number">{len(alike)} of {len(clients)} programs</p>',
        "",
        "of other libraries for FSDP2 give its results here, on CPU ranks.",
        ":::",
        "::::",
        "",
        *_table(),
        "",
        "Steps in fp32 with AdamW on two CPU ranks of one host. Where a row is slower, modules are so small that",
        "the Python code for each sharded module, about 100 us, takes longer than the module: shard the module that",
        "contains them. On a GPU: [one H100](benchmarks.md#one-h100).",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render())
