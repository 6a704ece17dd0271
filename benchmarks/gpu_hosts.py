"""Trains beside torch's FSDP2 on the GPUs of several hosts. ``make gpu`` has one host; torchrun starts this on each.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks/gpu_hosts.py

It is the sections ``training`` and ``codecs`` of ``gpu_report.py``. Rank 0 writes ``gpu-hosts.md`` after each part. Its
exit status is 1 if anything failed. ``--device simulated`` runs it without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(1, str(Path(__file__).parents[1]))  # after this folder

import torch.distributed as dist
from gpu_costs import add_codecs, add_training, rank_codecs, rank_training
from gpu_report import Outcome
from gpu_result import Result
from gpu_target import Target
from report import machine
from tables import table

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    begin, target = time.monotonic(), Target.find(arguments.device)
    result = Result(arguments.out, arguments.out / "gpu-hosts.json")

    def add(add_rows: Callable[..., None], found: list[Any], *about: object) -> None:
        """Add a table, and write the report, on rank 0."""
        if dist.get_rank():
            return
        add_rows(result, *about, found)
        state, reason = ("failed", "\n".join(["", *result.failures])) if result.failures else ("passed", "")
        title = f"Training on {dist.get_world_size()} ranks of {target.name}."
        outcome = Outcome("hosts", title, state, reason, time.monotonic() - begin, {"tables": result.tables})
        about_machine = table([{"": key, " ": value} for key, value in machine().items()], ["", " "])
        (arguments.out / "gpu-hosts.md").write_text(f"{outcome.markdown()}\n\n{about_machine}\n")

    rounds = 20 if target.device == "cuda" else 2
    for compiles in (False, True):
        add(add_training, gathered(rank_training(target, compiles, rounds)), target, compiles)
    add(add_codecs, gathered(rank_codecs(target)), "compiled")
    dist.destroy_process_group()
    return 1 if result.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
