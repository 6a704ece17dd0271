"""Step times and peak memory over many networks, in virtual time, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/schedule_sweep.py

The device and the network are simulated (``sim/``): 450 TFLOP/s, 3.5 TB/s. Each cell of the sweep has a model, a number
of ranks, a latency of all collectives and a bandwidth of each rank. The order of work of a step depends on no time, so
a step is run once for each library, and then repeated with the times of each network. Its peak memory is counted after
every operation, as in ``memory.py``. Nothing is random and the host's clock plays no part, so every run gives the same
figures.

The lower bound of a step is the longest of these:

- the computation of the unsharded model, plus the all-gather of the first group, and the latency of one reduction: no
  module computes before the first all-gather, and no gradient is complete before the last computation;
- for each mesh axis, the bytes of its collectives at its bandwidth, plus the latencies of one all-gather in each
  direction and of one reduction: two all-gathers in bf16 of all groups but the last, one of the last, which backward
  needs first, and a reduction in fp32. Axes have links of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from libraries import LIBRARIES, shard
from models import FusedBlock
from report import parser, publish
from sim.device import Charging, Device
from sim.ledger import Ledger
from sim.network import Network, simulated_ranks
from tables import table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BYTES_PER_GBIT = 1e3 / 8  # per microsecond
MB = 1e6
HIDDEN, KV, LENGTH = 14336, 1024, 4096
LATENCIES, GBITS, RANKS = (5, 20, 100, 500, 2000, 5000), (25, 100, 400, 1600, 3200), (8, 64, 512, 4096)
REPLICAS, EXPERT_PARALLEL = 8, 4
WORST_CELLS = 10


class Experts(nn.Module):
    """The local experts of a rank, each of which gets an equal part of the tokens."""

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.up), 1)
        pairs = zip(self.up, self.down, parts, strict=True)
        return torch.cat([down(nn.functional.silu(up(part))) for up, down, part in pairs], 1)


class ExpertBlock(nn.Module):
    """A transformer block, without attention, whose experts are a group of their own."""

    def __init__(self, dim: int, hidden: int, kv: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, dim + 2 * kv, bias=False), nn.Linear(dim, dim, bias=False)
        self.experts = Experts(dim, hidden, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm(x))[..., : x.shape[-1]])
        return x + self.experts(x)


@dataclass(frozen=True)
class Model:
    """A model with the shape of its input.

    Attributes:
        block: returns one of its ``layers`` modules, each of which is a group.
        replicas: the ranks of the replicate axis.
    """

    layers: int
    block: Callable[[], nn.Module]
    batch_size: int
    length: int
    dim: int
    replicas: int = 1

    def build(self) -> nn.Sequential:
        return nn.Sequential(*(self.block() for _ in range(self.layers)))

    def batch(self) -> torch.Tensor:
        return torch.randn(self.batch_size, self.length, self.dim, requires_grad=True)

    @property
    def has_experts(self) -> bool:
        with torch.device("meta"):
            return isinstance(self.block(), ExpertBlock)

    def meshes(self, ranks: int) -> tuple[DeviceMesh, DeviceMesh | None]:
        """Return the mesh of the model, and that of its experts, if it has any."""
        if self.replicas > 1:
            shape = self.replicas, ranks // self.replicas
            return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), None
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        if not self.has_experts:
            return mesh, None
        names = ("ep", "dp_of_experts")
        both = init_device_mesh("cpu", (EXPERT_PARALLEL, ranks // EXPERT_PARALLEL), mesh_dim_names=names)
        return mesh, both["dp_of_experts"]

    def sharded(self, library: str, mesh: DeviceMesh, mesh_of_experts: DeviceMesh | None) -> nn.Module:
        """Return the model, sharded by ``library``."""
        model = self.build()
        if mesh_of_experts is not None:
            for block in model:
                shard(LIBRARIES[library], cast(ExpertBlock, block).experts, [], mesh_of_experts, bf16=True)
        shard(LIBRARIES[library], model, list(model), mesh, bf16=True)
        return model


def _blocks(layers: int, dim: int, batch: int, replicas: int = 1) -> Model:
    return Model(layers, lambda: FusedBlock(dim, HIDDEN, KV), batch, LENGTH, dim, replicas)


MODELS = {
    "8 blocks of 4096, batch 2": _blocks(8, 4096, 2),
    "16 blocks of 5120, batch 1": _blocks(16, 5120, 1),
    "16 blocks of 5120, batch 2": _blocks(16, 5120, 2),
    "16 blocks of 5120, batch 4": _blocks(16, 5120, 4),
    "200 tiny modules": Model(200, lambda: nn.Linear(64, 64), 1, 256, 64),
    "experts on their own mesh": Model(8, lambda: ExpertBlock(4096, 4096, KV, 4), 2, LENGTH, 4096),
    "hybrid, 8 replicas": _blocks(8, 4096, 2, REPLICAS),
}


@dataclass(frozen=True)
class Cell:
    """One network: microseconds of each collective, and Gbit/s of each rank."""

    latency: float
    gbit: float

    def apply(self, network: Network) -> None:
        network.latency, network.bandwidth = self.latency, self.gbit * BYTES_PER_GBIT


@dataclass
class Steps:
    """The recorded steps of a sharded model on ``network``."""

    model: nn.Module
    batch: torch.Tensor
    network: Network
    ledger: Ledger

    def run(self) -> float:
        """Run forward and backward, and return the virtual milliseconds."""
        self.network.finish()
        self.model(self.batch).sum().backward()
        self.model.zero_grad()
        return self.network.finish() / 1e3

    def record(self) -> Recorded:
        """Run a step, and return its work and its peak memory."""
        with self.ledger:
            self.ledger.forget_peak()
            with self.network.device.recorded() as work:
                seconds = self.run()
        recorded = Recorded(work, self.ledger.peak / MB)
        assert abs(recorded.repeat(self.network) - seconds) < 1e-6 * seconds, "a step depends on the times of its work"
        return recorded


@dataclass(frozen=True)
class Recorded:
    """The work of a step, and its peak memory in MB."""

    work: list[Callable[[], None]]
    peak: float

    def repeat(self, network: Network) -> float:
        """Return the virtual milliseconds of the step on ``network``."""
        return network.repeat(self.work) / 1e3


def cells_of(library: str, of: Model, ranks: int, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of a step over each network, and its peak memory."""
    network = Network(Device(flops=450e6, bandwidth=3.5e6))
    with simulated_ranks(network, ranks):
        meshes = of.meshes(ranks)  # their construction needs real tensors
        with FakeTensorMode(allow_non_fake_inputs=True), Charging(network.device):
            steps = Steps(of.sharded(library, *meshes), of.batch(), network, Ledger())
            steps.run()
            recorded = [steps.record() for _ in range(2)][-1]  # the first one finds all memory that steps keep
            for cell in cells:
                cell.apply(network)
                yield {f"{library} ms": recorded.repeat(network), f"{library} peak MB": recorded.peak}


def computation(of: Model) -> float:
    """Return the microseconds of a step of the unsharded model in bf16."""
    device = Device(flops=450e6, bandwidth=3.5e6)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device.installed(), FakeTensorMode(allow_non_fake_inputs=True):
            model, batch = of.build(), of.batch()
            with Charging(device):
                model(batch).sum().backward()
    finally:
        torch.set_default_dtype(default)
    return device.finish()


def lower_bound(of: Model, ranks: int, cell: Cell, computing: float) -> float:
    """Return the lower bound of a step in milliseconds."""
    bandwidth = cell.gbit * BYTES_PER_GBIT
    with torch.device("meta"):
        block = of.block()
    experts = sum(p.numel() for p in block.experts.parameters()) if isinstance(block, ExpertBlock) else 0
    dense = sum(p.numel() for p in block.parameters()) - experts
    shards = ranks // of.replicas
    first = cell.latency + dense * 2 * (shards - 1) / shards / bandwidth
    bounds = [computing + first + cell.latency * (1 + (of.replicas > 1))]
    for numel, size in ((dense, shards), (experts, ranks // EXPERT_PARALLEL)):
        nbytes = numel * (of.layers * (2 + 2 + 4) - 2) * (size - 1) / size
        bounds.append(nbytes / bandwidth + 3 * cell.latency)
    all_reduced = 2 * of.layers * dense * 4 / shards * (of.replicas - 1) / of.replicas
    bounds.append(all_reduced / bandwidth + 4 * cell.latency)
    return max(bounds) / 1e3


def sweep(name: str, ranks: int, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the rows of a model and a number of ranks."""
    of = MODELS[name]
    computing = computation(of)
    rows = []
    for cell, ours, theirs in zip(cells, *(list(cells_of(each, of, ranks, cells)) for each in LIBRARIES), strict=True):
        row = {"model": name, "ranks": ranks, "latency us": cell.latency, "Gbit/s": cell.gbit} | ours | theirs
        row["bound ms"] = lower_bound(of, ranks, cell, computing)
        row["time, ours/fsdp2"] = row["ours ms"] / row["fsdp2 ms"]
        row["peak, ours/fsdp2"] = row["ours peak MB"] / row["fsdp2 peak MB"]
        row["ours/bound"], row["fsdp2/bound"] = row["ours ms"] / row["bound ms"], row["fsdp2 ms"] / row["bound ms"]
        rows.append(row)
    return rows


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ``ratios``."""
    return exp(fmean(map(log, ratios)))


def summary(model: str, ranks: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means and the extremes over the networks of one model and one number of ranks."""

    def largest(name: str) -> str:
        return f"{max(row[name] for row in rows):.3f}"

    return {
        "model": model,
        "ranks": ranks,
        "networks": len(rows),
        "time, ours/fsdp2": geometric_mean([row["time, ours/fsdp2"] for row in rows]),
        "largest": largest("time, ours/fsdp2"),
        "above 1": sum(row["time, ours/fsdp2"] > 1 for row in rows),
        "largest peak, ours/fsdp2": largest("peak, ours/fsdp2"),
        "ours/bound": geometric_mean([row["ours/bound"] for row in rows]),
        "fsdp2/bound": geometric_mean([row["fsdp2/bound"] for row in rows]),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", default="", help="only models whose names contain this text")
    options.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks; 512 with replicas")
    options.add_argument("--cells", type=Path, help="file of JSON lines for all cells; what it has is not run again")
    arguments = options.parse_args()
    quick = arguments.quick
    latencies, gbits = ((20, 2000), (400,)) if quick else (LATENCIES, GBITS)
    cells = [Cell(latency, gbit) for latency, gbit in product(latencies, gbits)]
    rows: list[dict[str, Any]] = []
    if arguments.cells and arguments.cells.exists():
        rows = [json.loads(line) for line in arguments.cells.read_text().splitlines()]
    for name, of in list(MODELS.items())[: 1 if quick else None]:
        for ranks in (512,) if quick or of.replicas > 1 else map(int, arguments.ranks.split(",")):
            if arguments.models not in name or any((name, ranks) == (row["model"], row["ranks"]) for row in rows):
                continue
            found = sweep(name, ranks, cells)
            rows += found
            print(json.dumps(summary(name, ranks, found)), flush=True)
            if arguments.cells:
                with arguments.cells.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    rows.sort(key=lambda row: -row["time, ours/fsdp2"])
    print("The cells with the largest ratios:", table(rows[:WORST_CELLS], list(rows[0])), sep="\n\n")
    places = [(name, ranks) for name in MODELS for ranks in sorted({row["ranks"] for row in rows})]
    by_place = {place: [row for row in rows if (row["model"], row["ranks"]) == place] for place in places}
    summaries = [summary(*place, found) for place, found in by_place.items() if found]
    publish("steps over many networks", {}, list(summaries[0]), summaries, arguments.out)


if __name__ == "__main__":
    main()
