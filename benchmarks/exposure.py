"""Measures communication that a step does not hide behind compute, in virtual time, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/exposure.py

Eight transformer blocks (1.7 B parameters, bf16, reduction in fp32) train on a simulated device and network (``sim/``)
with 450 TFLOP/s, 3.5 TB/s and 20 microseconds per collective. The libraries' own code launches all work, and the
simulation computes when it would be done. Exposed communication is the time of the step minus that of the same step
over a network that takes no time. Nothing is random or depends on the host's clock, so every run gives the same
figures.

The floor is the first all-gather and the last reduce-scatter of a block in fp32. They cannot be hidden if the gradients
of a block are sent together, as FSDP2 and ours do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from libraries import LIBRARIES, prefetch_explicitly, shard
from models import FusedBlock
from report import parser, publish
from sim.device import Charging, Device
from sim.network import Network, simulated_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from composable_fsdp import Cast, CommunicationPolicy

DIM, HIDDEN, KV, LAYERS = 4096, 14336, 1024, 8
BATCH, LENGTH = 2, 5120
LATENCY = 20.0
BYTES_PER_GBIT = 1e3 / 8  # per microsecond


@dataclass(frozen=True)
class ShmSocket:
    """A network with ``gbit`` Gbit/s per rank, for each process group or, if ``shared``, for all of them together."""

    gbit: float
    shared: bool


@dataclass(frozen=True)
class Variant:
    """A library with its settings.

    Attributes:
        separate_reductions: if true, gradients have their own process group.
        ahead: the number of blocks to prefetch in both passes, if it is not the library's default. It is set by lists
            in FSDP2, and by ``prefetch_limit`` in ours, which keeps one more block from forward to backward.
        narrow: if true, gradients are sent in 16 bits and summed in fp32 by the receiver. Only for ours.
    """

    library: str
    separate_reductions: bool = False
    ahead: int | None = None
    narrow: bool = False

    def build(self, mesh: Any) -> nn.Module:
        model = nn.Sequential(*(FusedBlock(DIM, HIDDEN, KV) for _ in range(LAYERS)))
        options = {"comm_policy": CommunicationPolicy(reduce_scatter=Cast(torch.bfloat16))} if self.narrow else {}
        shard(LIBRARIES[self.library], model, list(model), mesh, bf16=True, **options)
        if self.ahead is not None and self.library == "ours":
            cast(Any, model).set_schedule(prefetch_limit=self.ahead)
        elif self.ahead is not None:
            prefetch_explicitly(list(model), self.ahead)
        if self.separate_reductions:
            model.set_separate_reduce_scatter_group(True)
        return model


VARIANTS = {
    "ours": Variant("ours"),
    "ours, three ahead": Variant("ours", ahead=3),
    "ours, two groups": Variant("ours", separate_reductions=True),
    "ours, 16-bit gradients": Variant("ours", narrow=True),
    "fsdp2": Variant("fsdp2"),
    "fsdp2, three ahead": Variant("fsdp2", ahead=3),
    "fsdp2, two groups": Variant("fsdp2", separate_reductions=True),
}


def step_of(model: nn.Module, network: Network) -> Callable[[], float]:
    """Return a training step that returns its virtual milliseconds."""
    x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def run() -> float:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return network.finish() / 1e3

    return run


def steps(variant: Variant, ranks: int, wires: Sequence[ShmSocket]) -> list[dict[str, float]]:
    """Return milliseconds of a step over each of ``wires``: in total, without communication, and exposed."""
    network = Network(Device(flops=450e6, bandwidth=3.5e6))
    with simulated_ranks(network, ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = variant.build(mesh)
        step = step_of(model, network)
        with Charging(network.device):
            step()  # the first step makes the optimizer's state, and records the order of the modules
            free = step()
            network.latency = LATENCY
            taken = []
            for wire in wires:
                network.bandwidth, network.shared = wire.gbit * BYTES_PER_GBIT, wire.shared
                whole = [step() for _ in range(2)][-1]
                taken.append({"step ms": whole, "no communication ms": free, "exposed ms": whole - free})
    return taken


def floor(ranks: int, gbit: float) -> float:
    """Return the milliseconds of a block's all-gather in bf16 and of its reduce-scatter in fp32."""
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in FusedBlock(DIM, HIDDEN, KV).parameters())
    return (2 * LATENCY + numel * (2 + 4) * (ranks - 1) / ranks / (gbit * BYTES_PER_GBIT)) / 1e3


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gbits", default="400", help="bandwidths per rank in Gbit/s")
    arguments = options.parse_args()
    wires = [ShmSocket(float(gbit), shared) for gbit in arguments.gbits.split(",") for shared in (False, True)]
    rows: list[dict[str, Any]] = []
    for ranks in (8,) if arguments.quick else (64, 4096):
        for name, variant in VARIANTS.items():
            for wire, times in zip(wires, steps(variant, ranks, wires), strict=True):
                place = {"ranks": ranks, "Gbit/s": wire.gbit, "wire": "one" if wire.shared else "one per group"}
                rows.append(place | {"variant": name} | times | {"floor ms": floor(ranks, wire.gbit)})
    rows.sort(key=lambda row: (row["ranks"], -row["Gbit/s"], row["wire"]))
    columns = ["ranks", "Gbit/s", "wire", "variant", "step ms", "no communication ms", "exposed ms", "floor ms"]
    publish("exposed communication", {"model": "8 blocks, 1.7 B parameters, bf16"}, columns, rows, arguments.out)


if __name__ == "__main__":
    main()
