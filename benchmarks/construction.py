"""Measures ``fully_shard`` and ``state_dict`` of a model like Llama 3 70B at 1024 ranks, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/construction.py

The model is on the meta device and the process group is fake, so only the work of the host is measured, which every
rank does once per job before memory is allocated. CPU time is measured, because nothing waits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks, shard
from models import Llama
from report import interleaved, parser, publish, ratios, spread
from torch.distributed.device_mesh import DeviceMesh

RANKS = 1024
PARTS = ("fully_shard", "state_dict")


def milliseconds(action: Callable[[], object]) -> float:
    """Return the CPU time of ``action``, after a garbage collection."""
    gc.collect()
    begin = time.process_time()
    action()
    return (time.process_time() - begin) * 1e3


def construction(library: str, mesh: DeviceMesh, layers: int) -> Callable[[], list[float]]:
    """Return a variant that returns the milliseconds of each of ``PARTS``."""

    def run() -> list[float]:
        with torch.device("meta"):
            model = Llama(vocabulary=128256, dim=8192, hidden=28672, kv=1024, layers=layers)
        sharding = milliseconds(lambda: shard(LIBRARIES[library], model, list(model.blocks), mesh, bf16=False))
        return [sharding, milliseconds(model.state_dict)]

    return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    layers, rounds = (8, 3) if arguments.quick else (80, arguments.rounds)
    with fake_ranks(RANKS) as mesh:
        variants = {library: construction(library, mesh, layers) for library in LIBRARIES}
        taken = interleaved(variants, rounds, warm_up=1)
    rows = []
    for i, part in enumerate(PARTS):
        of = {library: [times[i] for times in samples] for library, samples in taken.items()}
        row: dict[str, Any] = {"part": part} | {f"{library} ms": spread(times) for library, times in of.items()}
        rows.append(row | {"ours/fsdp2": ratios(of["ours"], of["fsdp2"])})
    settings = {"ranks": RANKS, "parameters": 3 + 9 * layers}
    publish("construction", settings, ["part", "ours ms", "fsdp2 ms", "ours/fsdp2"], rows, arguments.out)


if __name__ == "__main__":
    main()
