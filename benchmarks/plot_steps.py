"""Draws step times relative to FSDP2's, FSDP1's and DDP's, from a result of ``step_time.py``.

    python benchmarks/plot_steps.py benchmarks/results/2026-11-22-step-time-2-local.json docs/step-times.png

Bars are medians of wall time with their 95 % intervals. This program needs matplotlib, but not torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

PEERS = {"best fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP"}
CASES = {
    "gpt-256": "GPT, 26 M parameters\n256 tokens",
    "gpt-32": "GPT, 26 M parameters\n32 tokens",
    "tiny-200": "200 tiny modules",
    "experts": "4 experts of\n194 parameters",
    "embedding": "embedding",
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("result", type=Path, help="the file that step_time.py wrote with --out")
    options.add_argument("out", type=Path, help="the picture")
    arguments = options.parse_args()
    rows = json.loads(arguments.result.read_text())["rows"]
    figure, axis = plt.subplots(figsize=(8, 3.2))
    width = 0.8 / len(PEERS)
    for index, (peer, name) in enumerate(PEERS.items()):
        ratios = [row[f"ours/{peer} wall"] for row in rows]
        places = [at + (index - 1) * width for at in range(len(rows))]
        medians = [ratio["median"] for ratio in ratios]
        below = [ratio["median"] - ratio["low"] for ratio in ratios]
        above = [ratio["high"] - ratio["median"] for ratio in ratios]
        bars = axis.bar(places, medians, width, yerr=(below, above), capsize=2, label=f"ours / {name}")
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(rows)), [CASES.get(row["case"], row["case"]) for row in rows], fontsize=8)
    axis.set_ylabel("step time, ratio")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=100)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
