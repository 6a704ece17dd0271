"""Runs variants in turn, and stores results with the machine, the versions and the command."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tables import ratios, spread, table

import composable_fsdp

__all__ = ["SHARED_MEMORY", "interleaved", "parser", "publish", "ratios", "sequential", "spread", "timed"]

T = TypeVar("T")

SHARED_MEMORY = "COMPOSABLE_FSDP_SHARED_MEMORY"
"""The environment variable that, at 0, prevents ranks of one host from sharing memory. Every result records it."""


def interleaved(variants: dict[str, Callable[[], T]], rounds: int, *, warm_up: int = 2) -> dict[str, list[T]]:
    """Run the variants in turn, ``rounds`` times after ``warm_up`` uncounted rounds, and return their results."""
    samples: dict[str, list[T]] = {name: [] for name in variants}
    for turn in range(warm_up + rounds):
        for name, variant in variants.items():
            sample = variant()
            if turn >= warm_up:
                samples[name].append(sample)
    return samples


def sequential(variants: dict[str, Callable[[], T]], rounds: int, *, warm_up: int = 2) -> dict[str, list[T]]:
    """Run all rounds of a variant one after the other, so that caches keep its code and objects."""
    return {name: interleaved({name: variant}, rounds, warm_up=warm_up)[name] for name, variant in variants.items()}


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """Return ``action`` as a variant that all ranks begin together and that returns its milliseconds."""

    def run() -> float:
        dist.barrier()
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3

    return run


def machine() -> dict[str, Any]:
    """Return a description of the machine and the versions."""
    return {
        "cpus": os.cpu_count(),
        "processor": processor(),
        "kernel": platform.release(),
        "load average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "composable_fsdp": composable_fsdp.__version__,
    }


def processor() -> str:
    """Return the name of the processor on Linux, and its architecture elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark. ``--help`` shows the first line of ``doc``."""
    options = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    options.add_argument("--quick", action="store_true", help="few rounds and small sizes: does it run?")
    options.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return options


def publish(
    name: str, settings: dict[str, Any], columns: Sequence[str], rows: list[dict[str, Any]], out: Path | None
) -> None:
    """Print ``rows`` as a table, and write them as JSON to ``out``, with all information to repeat the benchmark.

    Args:
        name: the name of the benchmark.
        settings: values that distinguish runs of the same benchmark, such as the number of ranks.
        columns: the keys of ``rows`` that tables show.
        rows: numbers, texts, and results of :func:`spread`.
        out: the path of the file. With None, no file is written.
    """
    print(f"\n{name}, {', '.join(f'{key} {value}' for key, value in settings.items())}\n\n{table(rows, columns)}\n")
    if out is None:
        return
    document = {
        "name": name,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "settings": settings | {SHARED_MEMORY: os.environ.get(SHARED_MEMORY, "unset")},
        "machine": machine(),
        "columns": list(columns),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {out}")
