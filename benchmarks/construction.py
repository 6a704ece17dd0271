"""Measures ``fully_shard``, ``to_empty`` and ``state_dict`` of a model like Llama 3 70B at 1024 ranks, against FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/construction.py

The model is on the meta device and the process group is fake, so only the work of the host is measured, which every
rank does once per job. CPU time is measured, because nothing waits. Resident memory is the growth of a process of its
own from the meta model until its shards have memory on CPU, without values: pages that nothing has written to take
none.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks, shard
from models import Llama
from report import interleaved, parser, publish, ratios, spread
from resident import pss_mb, trim
from torch.distributed.device_mesh import DeviceMesh

RANKS = 1024
PARTS = ("fully_shard", "to_empty", "state_dict")


def milliseconds(action: Callable[[], object]) -> float:
    """Return the CPU time of ``action``, after a garbage collection."""
    gc.collect()
    begin = time.process_time()
    action()
    return (time.process_time() - begin) * 1e3


def meta_model(layers: int) -> Llama:
    with torch.device("meta"):
        return Llama(vocabulary=128256, dim=8192, hidden=28672, kv=1024, layers=layers)


def construct(library: str, model: Llama, mesh: DeviceMesh) -> None:
    shard(LIBRARIES[library], model, list(model.blocks), mesh, bf16=False)


def times(library: str, mesh: DeviceMesh, layers: int) -> list[float]:
    """Return the milliseconds of each of ``PARTS``."""
    model = meta_model(layers)
    return [
        milliseconds(lambda: construct(library, model, mesh)),
        milliseconds(lambda: model.to_empty(device="cpu")),
        milliseconds(lambda: model.state_dict()),
    ]


def resident_mb(library: str, layers: int) -> float:
    """Return the resident memory that construction takes in this process, without what the libraries import first."""
    with fake_ranks(RANKS) as mesh:
        construct(library, meta_model(1), mesh)
        model = meta_model(layers)
        before = settled_mb()
        construct(library, model, mesh)
        model.to_empty(device="cpu")
        return settled_mb() - before


def settled_mb() -> float:
    gc.collect()
    trim()
    return pss_mb()


def in_process(library: str, layers: int) -> float:
    """Return :func:`resident_mb` of a new process."""
    command = [sys.executable, __file__, "--library", library, "--layers", str(layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def row(part: str, unit: str, of: dict[str, list[float]]) -> dict[str, Any]:
    spreads = {library: spread(values) for library, values in of.items()}
    return {"part": part, "unit": unit} | spreads | {"ours/fsdp2": ratios(of["ours"], of["fsdp2"])}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--layers", type=int, default=80)
    options.add_argument("--library", choices=LIBRARIES, help="print the resident memory of this process with it")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.library:
        print(resident_mb(arguments.library, arguments.layers))
        return
    layers, rounds = (8, 3) if arguments.quick else (arguments.layers, arguments.rounds)
    with fake_ranks(RANKS) as mesh:
        taken = interleaved({each: partial(times, each, mesh, layers) for each in LIBRARIES}, rounds, warm_up=1)
    resident = interleaved({each: partial(in_process, each, layers) for each in LIBRARIES}, min(rounds, 5), warm_up=0)
    rows = [
        row(part, "ms", {library: [sample[i] for sample in samples] for library, samples in taken.items()})
        for i, part in enumerate(PARTS)
    ]
    rows.append(row("resident memory", "MB", resident))
    settings = {"ranks": RANKS, "parameters": 3 + 9 * layers}
    publish("construction", settings, ["part", "unit", "ours", "fsdp2", "ours/fsdp2"], rows, arguments.out)


if __name__ == "__main__":
    main()
