"""Step times of schedules chosen by measured costs, in virtual time, over many networks, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/schedule_sweep.py

The device and the network are simulated (``sim/``): 450 TFLOP/s, 3.5 TB/s. Each cell of the sweep has a latency of all
collectives, a bandwidth of each rank and a number of ranks. Ours runs two steps with default settings, then
``calibrate()`` measures two steps, and the settings that it chooses apply from the next one on: seven steps in all, of
which the last one is shown. The lower bound is the longer one of the computation and the wire. Nothing is random and
the host's clock plays no part, so every run gives the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from statistics import fmean
from typing import Any, cast

import torch
from libraries import LIBRARIES, shard
from models import FusedBlock
from report import parser, publish
from sim.device import Charging, Device
from sim.network import Network, simulated_ranks
from tables import table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

BYTES_PER_GBIT = 1e3 / 8  # per microsecond
HIDDEN, KV, LENGTH = 14336, 1024, 4096
LATENCIES, GBITS, RANKS = (5, 20, 100, 500, 2000, 5000), (25, 100, 400, 1600, 3200), (8, 64, 512, 4096)
FIRST_STEPS, LEARNING_STEPS = 2, 5
WORST_CELLS = 10


@dataclass(frozen=True)
class Model:
    """A model of ``layers`` blocks of width ``dim``, and its batch size and sequence length."""

    layers: int
    dim: int
    batch: int
    length: int = LENGTH
    tiny: bool = False

    def build(self) -> nn.Sequential:
        if self.tiny:
            return nn.Sequential(*(nn.Linear(self.dim, self.dim) for _ in range(self.layers)))
        return nn.Sequential(*(FusedBlock(self.dim, HIDDEN, KV) for _ in range(self.layers)))


MODELS = {
    "8 blocks of 4096, batch 2": Model(8, 4096, 2),
    "16 blocks of 5120, batch 1": Model(16, 5120, 1),
    "16 blocks of 5120, batch 2": Model(16, 5120, 2),
    "16 blocks of 5120, batch 4": Model(16, 5120, 4),
    "200 tiny modules": Model(200, 64, 1, 256, tiny=True),
}


@dataclass(frozen=True)
class Cell:
    """One network: microseconds of each collective, and Gbit/s of each rank."""

    latency: float
    gbit: float


def step_times(library: str, of: Model, ranks: int, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of a step over each network, and those of its computation and of its wire."""
    network = Network(Device(flops=450e6, bandwidth=3.5e6))
    with simulated_ranks(network, ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = of.build()
        shard(LIBRARIES[library], model, list(model), mesh, bf16=True)
        step = training_step(model, torch.randn(of.batch, of.length, of.dim, requires_grad=True), network)
        with Charging(network.device):
            step()
            free = step()
            for cell in cells:
                network.latency, network.bandwidth = cell.latency, cell.gbit * BYTES_PER_GBIT
                if library != "ours":
                    step()
                    yield {"step ms": step(), "computation ms": free}
                    continue
                yield chosen_step(cast(Any, model), step) | {"computation ms": free}


def chosen_step(model: Any, step: Callable[[], float]) -> dict[str, Any]:
    """Return the milliseconds of a step with default settings, of the slowest step that learns, and after that."""
    model.set_costs(None)
    default = [step() for _ in range(FIRST_STEPS)][-1]
    model.calibrate()
    *learning, last = [step() for _ in range(LEARNING_STEPS)]
    choice = model.schedule_choice()
    settings = choice.settings
    return {
        "step ms": last,
        "default ms": default,
        "slowest learning ms": max(learning),
        "predicted ms": 1e3 * choice.seconds,
        "chosen": f"{settings.grad_buckets} buckets, {'zero-copy' if settings.zero_copy else 'one message'}, "
        f"{settings.prefetch_limit} ahead, {settings.max_fused_bytes >> 20} MiB fused",
    }


def training_step(model: nn.Module, x: torch.Tensor, network: Network) -> Callable[[], float]:
    """Return a function that runs forward and backward and returns its virtual milliseconds."""

    def run() -> float:
        network.finish()
        model(x).sum().backward()
        model.zero_grad()
        return network.finish() / 1e3

    return run


def lower_bound(of: Model, ranks: int, cell: Cell, computation: float) -> float:
    """Return the longer one of the computation and the wire: two all-gathers in bf16 and a reduce-scatter in fp32."""
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in of.build().parameters())
    return max(computation, numel * (2 + 2 + 4) * (ranks - 1) / ranks / (cell.gbit * BYTES_PER_GBIT) / 1e3)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ``ratios``."""
    return exp(fmean(map(log, ratios)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", default="", help="only models whose names contain this text")
    arguments = options.parse_args()
    quick = arguments.quick
    latencies, gbits = ((20, 2000), (400,)) if quick else (LATENCIES, GBITS)
    cells = [Cell(latency, gbit) for latency, gbit in product(latencies, gbits)]
    rows: list[dict[str, Any]] = []
    for name, of in list(MODELS.items())[: 1 if quick else None]:
        for ranks in (512,) if quick else RANKS:
            if arguments.models not in name:
                continue
            by_library = [list(step_times(library, of, ranks, cells)) for library in LIBRARIES]
            for cell, ours, theirs in zip(cells, *by_library, strict=True):
                bound = lower_bound(of, ranks, cell, ours.pop("computation ms"))
                row = {"model": name, "ranks": ranks, "latency us": cell.latency, "Gbit/s": cell.gbit} | ours
                row |= {"fsdp2 ms": theirs["step ms"], "bound ms": bound}
                row |= {"ours/fsdp2": ours["step ms"] / theirs["step ms"]}
                row |= {"predicted/step": ours["predicted ms"] / ours["step ms"]}
                rows.append(row)
    rows.sort(key=lambda row: -row["ours/fsdp2"])
    print("The cells with the largest ratios:", table(rows[:WORST_CELLS], list(rows[0])), sep="\n\n")
    places = sorted({(row["model"], row["ranks"]) for row in rows})
    summaries = [summary(*place, [row for row in rows if (row["model"], row["ranks"]) == place]) for place in places]
    publish("schedules chosen by costs", {}, list(summaries[0]), summaries, arguments.out)


def summary(model: str, ranks: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means and the extremes over the networks of one model and one number of ranks."""
    ratios = [row["ours/fsdp2"] for row in rows]
    predictions = [row["predicted/step"] for row in rows]
    return {
        "model": model,
        "ranks": ranks,
        "networks": len(rows),
        "ours/fsdp2": geometric_mean(ratios),
        "largest": f"{max(ratios):.3f}",
        "default/fsdp2": geometric_mean([row["default ms"] / row["fsdp2 ms"] for row in rows]),
        "largest default": f"{max(row['default ms'] / row['fsdp2 ms'] for row in rows):.3f}",
        "ours/bound": geometric_mean([row["step ms"] / row["bound ms"] for row in rows]),
        "predicted/step": f"{min(predictions):.3f} to {max(predictions):.3f}",
    }


if __name__ == "__main__":
    main()
