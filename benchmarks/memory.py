"""Computes exact peak and idle bytes of one rank, against torch's FSDP2 and a lower bound.

    OMP_NUM_THREADS=1 python benchmarks/memory.py

The process group is fake. The profiler records every allocation of torch since the model was built, and their running
sum is the memory of the rank. It is exact and the same on every run. It does not include memory that torch does not
allocate, such as sockets of the backend and memory shared between ranks, which ``resident.py`` measures. The optimizer
is SGD without momentum, which has no state.

If the host waits for collectives, as on CPU, libraries use another schedule than on a device with streams, such as an
accelerator. The rows for streams are from a simulated device (``sim/``), where memory is counted after every operation.
A caching allocator needs at least that. It may reserve more, because memory freed on one stream cannot be reused on
another: ``reserved`` is from a model of torch's CUDA allocator (``sim/allocator.py``), with expandable segments, whose
size does not depend on what ran before. ``reserved_memory.py`` has batches of changing lengths.

``Bound`` is a lower bound for any library that shards by groups.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks, shard
from models import CASES, LARGE_BLOCKS, SMALL_BLOCKS, Case
from report import parser, publish
from sim.allocator import Allocator
from sim.device import Device
from sim.ledger import Ledger
from sim.network import Network, simulated_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP = 2
STEP, FORWARD = "the measured step", "its forward"
MB = 1e6


@dataclass(frozen=True)
class Timeline:
    """Allocations as ``(ns, bytes, negative if freed)``, and the ranges with labels."""

    events: list[tuple[int, int]]
    ranges: dict[str, tuple[int, int]]

    @staticmethod
    def of(action: Callable[[], object]) -> Timeline:
        """Record all allocations of ``action``, which labels ranges with ``record_function``."""
        gc.collect()  # memory of earlier actions must not be freed during this one
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            action()
        events = profiler.profiler.kineto_results.events()
        return Timeline(
            sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]),
            {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in (STEP, FORWARD)},
        )

    def held(self, label: str) -> tuple[int, int, int]:
        """Return the bytes before the range ``label``, the most in it, and those after it."""
        begin, end = self.ranges[label]
        before = sum(nbytes for time, nbytes in self.events if time < begin)
        within = list(accumulate((n for time, n in self.events if begin <= time <= end), initial=before))
        return before, max(within), within[-1]


def train(model: nn.Module, batch: torch.Tensor) -> None:
    """Run steps until two consecutive ones are equal, then the step with the label."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for label in (*(nullcontext for _ in range(WARM_UP)), record_function):
        gc.collect()
        with label(STEP):
            with label(FORWARD):
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss


def batch_of(case: Case, *, bf16: bool) -> torch.Tensor:
    batch = case.batch(torch.Generator().manual_seed(0))
    return batch.bfloat16() if bf16 and batch.is_floating_point() else batch


def sharded(library: ModuleType, case: Case, mesh: DeviceMesh, *, bf16: bool) -> Timeline:
    batch = batch_of(case, bf16=bf16)

    def run() -> None:
        model = case.build()
        shard(library, model, case.blocks(model), mesh, bf16=bf16)
        train(model, batch)

    return Timeline.of(run)


@dataclass(frozen=True)
class Bound:
    """The bytes that a rank needs at least.

    They are its shards, one unsharded group, the gradients of that group, and the maximum of the activations for
    backward and the gradient shards.
    """

    shards: int
    group: int
    gradients: int
    activations: int

    @staticmethod
    def of(case: Case, ranks: int, *, bf16: bool) -> Bound:
        """Measure the activations that the forward of the unsharded model keeps for its backward."""
        model = case.build()
        total = sum(parameter.numel() for parameter in model.parameters())
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in case.blocks(model)]
        largest = max(*blocks, total - sum(blocks))
        model = model.bfloat16() if bf16 else model
        before, _, after = Timeline.of(lambda: train(model, batch_of(case, bf16=bf16))).held(FORWARD)
        width = 2 if bf16 else 4
        return Bound(-(-total // ranks) * 4, largest * width, largest * width, after - before)

    @property
    def total(self) -> int:
        return self.shards + self.group + self.gradients + max(self.activations, self.shards)


def at_eight_ranks(name: str, case: Case, *, bf16: bool) -> dict[str, Any]:
    """Return a row with peak and idle megabytes of both libraries, and the bound."""
    row: dict[str, Any] = {"case": name, "waits": "host", "dtype": "bf16" if bf16 else "fp32"}
    with fake_ranks(8) as mesh:
        for library in LIBRARIES:
            _, peak, idle = sharded(LIBRARIES[library], case, mesh, bf16=bf16).held(STEP)
            row |= {f"{library} peak MB": peak / MB, f"{library} idle MB": idle / MB}
    bound = Bound.of(case, 8, bf16=bf16).total / MB
    return row | {
        "bound MB": bound,
        "peak, ours/fsdp2": row["ours peak MB"] / row["fsdp2 peak MB"],
        "peak, ours/bound": row["ours peak MB"] / bound,
        "idle, ours/fsdp2": row["ours idle MB"] / row["fsdp2 idle MB"],
    }


def at_many_ranks(ranks: int) -> dict[str, Any]:
    """Return a row with the peak above idle memory of a rank that has no shards of most parameters."""
    row: dict[str, Any] = {"case": f"6.3 M parameters, {ranks} ranks, above idle", "waits": "host", "dtype": "fp32"}
    with fake_ranks(ranks, rank=ranks // 3) as mesh:
        for library in LIBRARIES:
            before, peak, _ = sharded(LIBRARIES[library], SMALL_BLOCKS, mesh, bf16=False).held(STEP)
            row[f"{library} peak MB"] = (peak - before) / MB
    return row | {"peak, ours/fsdp2": row["ours peak MB"] / row["fsdp2 peak MB"]}


def on_streams(name: str, case: Case, *, bf16: bool, reserves: bool = False) -> dict[str, Any]:
    """Return a row with peak and idle megabytes of both libraries on a simulated device of 8 ranks.

    With ``reserves``, it also has what an allocator reserves.
    """
    row: dict[str, Any] = {"case": name, "waits": "streams", "dtype": "bf16" if bf16 else "fp32"}
    for library in LIBRARIES:
        row |= on_streams_of(library, case, bf16=bf16, reserves=reserves)
    if reserves:
        row["reserved, ours/fsdp2"] = row["ours reserved MB"] / row["fsdp2 reserved MB"]
    return row | {
        "peak, ours/fsdp2": row["ours peak MB"] / row["fsdp2 peak MB"],
        "idle, ours/fsdp2": row["ours idle MB"] / row["fsdp2 idle MB"],
    }


def on_streams_of(library: str, case: Case, *, bf16: bool, reserves: bool) -> dict[str, float]:
    """Return the part of a row of :func:`on_streams` that one library has."""
    network, allocator = Network(Device(flops=1.0, bandwidth=1.0)), Allocator(expandable=True)
    ledger = Ledger(*[allocator] * reserves)
    with simulated_ranks(network, 8) as mesh, FakeTensorMode(allow_non_fake_inputs=True), ledger:
        batch, model = batch_of(case, bf16=bf16), case.build()
        shard(LIBRARIES[library], model, case.blocks(model), mesh, bf16=bf16)
        ledger.forget_peak()
        train(model, batch)
        del batch
        row = {f"{library} peak MB": ledger.peak / MB, f"{library} idle MB": ledger.count() / MB}
        if reserves:
            row[f"{library} reserved MB"] = allocator.peak_reserved / MB
            row[f"{library} reserved/allocated"] = allocator.peak_reserved / allocator.peak_allocated
    return row


COLUMNS = [
    *("case", "waits", "dtype", "ours peak MB", "fsdp2 peak MB", "bound MB", "peak, ours/fsdp2", "peak, ours/bound"),
    *("ours idle MB", "fsdp2 idle MB", "idle, ours/fsdp2"),
    *("ours reserved MB", "fsdp2 reserved MB", "ours reserved/allocated", "reserved, ours/fsdp2"),
]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    cases = ["experts"] if arguments.quick else ["gpt-256", "gpt-32", "experts"]
    rows = [at_eight_ranks(name, CASES[name], bf16=bf16) for name in cases for bf16 in (False, True)]
    rows.append(at_many_ranks(512 if arguments.quick else 4096))
    rows += [on_streams(name, CASES[name], bf16=bf16) for name in cases for bf16 in (False, True)]
    rows.append(on_streams("large blocks", LARGE_BLOCKS, bf16=True, reserves=True))
    publish("peak memory", {"ranks": 8}, COLUMNS, rows, arguments.out)


if __name__ == "__main__":
    main()
