"""What every benchmark prints and stores: medians with their spread, the machine, the versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import composable_fsdp


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and the middle half of ``samples``."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"median": middle, "low": low, "high": high, "runs": len(samples)}


def show(value: dict[str, float], digits: int = 2) -> str:
    """``median [low, high]``."""
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def interleaved(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each variant, taken in turn, each round begun together by all ranks."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, variant in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            variant()
            if turn >= 2:
                samples[name].append((time.perf_counter() - begin) * 1e3)
    return samples


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "composable_fsdp": composable_fsdp.__version__,
    }


def store(name: str, command: str, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Writes ``rows`` as JSON to ``out``, with the command that made them."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"name": name, "command": command, "machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")
