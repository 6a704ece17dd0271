"""Measures the resident memory of ranks that train over gloo, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/resident.py

Each variant trains in its own processes, several times in turn. The result is the proportional set size (PSS): a shared
page is divided between its ranks, so that the sum over ranks is the memory used on the host. Figures are means over
ranks, minus the memory after imports and the construction of the process group. The peak is that of the training steps.
Idle memory is measured after the steps and a garbage collection, and again after glibc has released unused memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from models import CASES
from report import interleaved, parser, publish, ratios, spread
from torch.distributed.device_mesh import init_device_mesh

RANKS = 2
FIGURES = ("peak", "idle", "idle trimmed")
INTERVAL = 0.02
"""The seconds between two samples of the set size. A sample takes about a millisecond."""


def pss_mb() -> float:
    """Return the proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("/proc/self/smaps_rollup has no line 'Pss:'. Linux 4.14 or newer is needed.")


class Peak:
    """A context that records the largest set size."""

    def __enter__(self) -> Peak:
        self.mb, self._over = pss_mb(), threading.Event()
        self._thread = threading.Thread(target=self._watchdog, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watchdog(self) -> None:
        while not self._over.wait(INTERVAL):
            self.mb = max(self.mb, pss_mb())


def train(library: str, case: str, steps: int) -> dict[str, float]:
    """The figures of one rank, in megabytes."""
    baseline = pss_mb()
    model = CASES[case].build()
    shard(LIBRARIES[library], model, CASES[case].blocks(model), init_device_mesh("cpu", (RANKS,)), bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = CASES[case].batch(torch.Generator().manual_seed(dist.get_rank()))
    gc.collect()
    trim()  # the unsharded model, which existed before sharding
    with Peak() as peak:
        for _ in range(steps):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    gc.collect()
    idle = pss_mb()
    trim()
    return dict(zip(FIGURES, (peak.mb - baseline, idle - baseline, pss_mb() - baseline), strict=True))


def trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def rank_main(library: str, case: str, steps: int) -> None:
    """Run on each rank's process. The first rank prints the means as its last line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same values
    dist.barrier()
    own = train(library, case, steps)
    figures = torch.tensor([own[name] for name in FIGURES])
    dist.all_reduce(figures)
    if dist.get_rank() == 0:
        print(json.dumps((figures / RANKS).tolist()))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(library: str, case: str, steps: int) -> list[float]:
    """Return ``FIGURES`` of ranks that are started only for this variant."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    ranks = [*torchrun, __file__, "--library", library, "--case", case, "--steps", str(steps)]
    done = subprocess.run(
        ranks, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def measure(case: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each of ``FIGURES``."""
    variants = {library: partial(in_processes, library, case, steps) for library in LIBRARIES}
    taken = interleaved(variants, rounds, warm_up=0)
    rows = []
    for i, figure in enumerate(FIGURES):
        of = {library: [values[i] for values in samples] for library, samples in taken.items()}
        row: dict[str, Any] = {"case": case, "PSS": figure}
        row |= {f"{library} MB": spread(values) for library, values in of.items()}
        rows.append(row | {"ours/fsdp2": ratios(of["ours"], of["fsdp2"])})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--library", choices=LIBRARIES, help="be one rank that trains with it (torchrun starts those)")
    options.add_argument("--case", choices=CASES, default="gpt-256")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    if arguments.library:
        rank_main(arguments.library, arguments.case, arguments.steps)
        return
    case, rounds = ("experts", 2) if arguments.quick else (arguments.case, arguments.rounds)
    rows = measure(case, arguments.steps, rounds)
    publish(
        "resident memory", {"ranks": RANKS}, ["case", "PSS", "ours MB", "fsdp2 MB", "ours/fsdp2"], rows, arguments.out
    )


if __name__ == "__main__":
    main()
