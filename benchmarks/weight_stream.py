"""Measures streams of full weights against ``unsharded_params`` of each group and FSDP2's ``full_tensor()``.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/weight_stream.py

Each variant reads one element of every full parameter, in turn. Times are of this rank's processor (CPU time, mean of
the ranks) and of the slowest rank. Memory is the peak of what torch allocates beside the model, of the rank that has
most, in bytes of full parameters of a bucket of ours: the stream may take two.

A second table has streams of changed values in bf16 by density, beside a full stream in bf16: bytes of the flushes that
a receiver gets, and times with the checksum of the flushes. The memory of what was sent is not in the peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from report import interleaved, parser, publish, ratios, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from composable_fsdp import stream_changed_params, stream_full_params, unsharded_params
from composable_fsdp.plugins.weight_stream import SentParams

MIB = 1 << 20
MODELS = {"many small": (100, 10, 64, 4 * MIB), "few large": (8, 1, 2048, 16 * MIB)}
"""By name: the groups, the square matrices of each, their rows, and the bytes of a bucket."""
QUICK = {"many small": (4, 4, 16, 8 << 10), "few large": (2, 1, 256, 256 << 10)}


class Block(nn.Module):
    """Some square matrices."""

    def __init__(self, count: int, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(rows, rows) for _ in range(count))


def build(library: str, groups: int, count: int, rows: int, mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(*(Block(count, rows) for _ in range(groups)))
    shard(LIBRARIES[library], model, list(model), mesh, bf16=False)
    return model


def read(tensor: torch.Tensor) -> None:
    tensor.view(-1)[0]


def variants(sizes: tuple[int, int, int, int], mesh: DeviceMesh) -> dict[str, Callable[[], None]]:
    groups, count, rows, bucket_bytes = sizes
    ours, theirs = (build(library, groups, count, rows, mesh) for library in ("ours", "fsdp2"))

    def stream() -> None:
        for bucket in stream_full_params(ours, bucket_bytes):
            for tensor in dict(bucket.items()).values():
                read(tensor)

    def by_group() -> None:
        for block in ours.children():
            with unsharded_params(block, writeback=False):
                for parameter in block.parameters():
                    read(parameter)

    def full_tensor() -> None:
        for parameter in theirs.parameters():
            assert isinstance(parameter, DTensor)
            read(parameter.full_tensor().detach())

    return {"stream": stream, "by group": by_group, "full_tensor": full_tensor}


DENSITIES = (0.0, 0.005, 0.02, 0.05, 0.1, 1.0)


def changed_rows(name: str, sizes: tuple[int, int, int, int], mesh: DeviceMesh, rounds: int) -> list[dict[str, Any]]:
    """Measure streams of changed values of one model. Changes are negations of values that are drawn anew each time."""
    groups, count, rows, bucket_bytes = sizes
    model, sent, table = build("ours", groups, count, rows, mesh), SentParams(), []
    shards = [p.to_local().detach().view(-1) for p in model.parameters() if isinstance(p, DTensor)]

    def change(density: float) -> None:
        for shard_ in shards:
            shard_[torch.rand(shard_.numel()) < density] *= -1

    def full() -> None:
        for bucket in stream_full_params(model, bucket_bytes, torch.bfloat16):
            read(bucket.packed) if bucket.packed is not None else None

    def changed() -> int:
        return sum(flush.nbytes for flush in stream_changed_params(model, sent, bucket_bytes, torch.bfloat16))

    whole = changed()
    for density in DENSITIES:
        full_times, changed_times, nbytes = [], [], 0
        for turn in range(rounds + 2):
            change(density)
            received = list[int]()
            taken = timed_on_all(full)(), timed_on_all(lambda into=received: into.append(changed()))()
            nbytes = received[0]
            if turn >= 2:
                full_times.append(taken[0])
                changed_times.append(taken[1])
        cpu, wall = ([[each[k] for each in times] for times in (changed_times, full_times)] for k in (0, 1))
        change(density)
        table.append(
            {
                "model": name,
                "parameters": groups * count,
                "changed": density,
                "bytes changed/full": nbytes / whole,
                "changed CPU ms": spread(cpu[0]),
                "full CPU ms": spread(cpu[1]),
                "CPU changed/full": ratios(*cpu),
                "time changed/full": ratios(*wall),
                "buckets of memory": peak_bytes(lambda: changed() and None) / bucket_bytes,
                "copy/shards": sent.nbytes / (sum(s.numel() for s in shards) * 2),
            }
        )
    return table


def timed_on_all(action: Callable[[], None]) -> Callable[[], tuple[float, float]]:
    """Return a function that returns CPU milliseconds, the mean of all ranks, and milliseconds, of the slowest."""

    def run() -> tuple[float, float]:
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        action()
        taken = torch.tensor([time.process_time() - cpu, time.perf_counter() - begin], dtype=torch.float64) * 1e3
        slowest = taken.clone()
        dist.all_reduce(taken)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return taken[0].item() / dist.get_world_size(), slowest[1].item()

    return run


def peak_bytes(action: Callable[[], None]) -> int:
    """Return the peak of the bytes that torch allocates on CPU in ``action``, of the rank with most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("read"):
        action()
    events = profiler.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = torch.tensor(max(accumulate(nbytes for _, nbytes in sizes)))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


CHANGED_COLUMNS = [
    *("model", "parameters", "changed", "bytes changed/full", "changed CPU ms", "full CPU ms", "CPU changed/full"),
    *("time changed/full", "buckets of memory", "copy/shards"),
]
COLUMNS = [
    *("model", "parameters", "groups", "bucket MiB", "stream CPU ms", "by group CPU ms", "full_tensor CPU ms"),
    *("CPU stream/by group", "CPU stream/full_tensor", "time stream/by group", "time stream/full_tensor"),
    *("stream buckets of memory", "by group buckets of memory", "full_tensor buckets of memory"),
]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = []
    for name, sizes in (QUICK if arguments.quick else MODELS).items():
        actions = variants(sizes, mesh)
        taken = interleaved(
            {n: timed_on_all(a) for n, a in actions.items()}, 2 if arguments.quick else arguments.rounds
        )
        groups, count, _, bucket_bytes = sizes
        row: dict[str, Any] = {"model": name, "parameters": groups * count, "groups": groups}
        row["bucket MiB"] = bucket_bytes / MIB
        cpu, wall = ({n: [each[k] for each in samples] for n, samples in taken.items()} for k in (0, 1))
        row |= {f"{n} CPU ms": spread(samples) for n, samples in cpu.items()}
        for other in ("by group", "full_tensor"):
            row[f"CPU stream/{other}"] = ratios(cpu["stream"], cpu[other])
            row[f"time stream/{other}"] = ratios(wall["stream"], wall[other])
        row |= {f"{n} buckets of memory": peak_bytes(action) / bucket_bytes for n, action in actions.items()}
        table.append(row)
    rounds = 2 if arguments.quick else arguments.rounds
    models = (QUICK if arguments.quick else MODELS).items()
    changes = [row for name, sizes in models for row in changed_rows(name, sizes, mesh, rounds)]
    if dist.get_rank() == 0:
        setup = {"ranks": dist.get_world_size()}
        publish("streams of full weights", setup, COLUMNS, table, arguments.out)
        out = arguments.out and arguments.out.with_stem(f"{arguments.out.stem}-changed")
        publish("streams of changed weights", setup, CHANGED_COLUMNS, changes, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
