"""Measures steps of AdamW with state in files: over the plain step, and cold, over a plain read of the files.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/offload_optimizer.py --folder /local/disk

Each rank has parameters of ``--mib`` MiB in fp32, and twice as much state. ``warm`` has the files in the page cache, as
the step before has left them. ``cold`` writes them to the disk and drops them from the page cache before each step;
``cold read`` does so before a plain read of all of them, in order, in pieces of 1 MiB. ``of the disk`` is the bandwidth
of the first over that of the second, by the bytes that are read; the step writes as many. Times are those of the wall.
Variants run in turn.

CPU times say what a step takes, also beside other programs: ``plain CPU``, and of the warm step ``step CPU`` of the
thread that steps and ``files CPU`` of the threads that read and write. ``overlapped`` is the larger of these over
``plain CPU``: the ratio if each thread has a core. It is computed, not measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from report import parser, publish, ratios, spread
from torch import nn

from composable_fsdp import fully_shard, local_optimizer, offload_optimizer
from composable_fsdp.optim.offload_optimizer import _offloads

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "fused": {"fused": True}}
WALL, CPU = ("plain", "warm", "cold", "cold read"), ("plain CPU", "step CPU", "files CPU")
PARAMETER_MIB = 4
_PIECE = 1 << 20


def parameters(mib: int) -> list[nn.Parameter]:
    """Return sharded parameters of ``mib`` MiB on each rank, with gradients."""
    rows = (PARAMETER_MIB << 18) // 1024 * dist.get_world_size()
    model = fully_shard(nn.Sequential(*(nn.Linear(1024, rows, bias=False) for _ in range(mib // PARAMETER_MIB))))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return list(model.parameters())


def files(optimizer: torch.optim.Optimizer) -> list[Any]:
    rests: list[Any] = [bucket.rest for bucket in _offloads[optimizer]._buckets]
    return [rest._file for rest in rests]


def drop(optimizer: torch.optim.Optimizer) -> None:
    """Write the files of ``optimizer`` to the disk, and drop them from the page cache."""
    for file in files(optimizer):
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(optimizer: torch.optim.Optimizer) -> None:
    piece = memoryview(bytearray(_PIECE))
    for file in files(optimizer):
        offset = 0
        while count := os.preadv(file.fileno(), [piece], offset):
            offset += count


def milliseconds(action: Any) -> tuple[float, float, float]:
    """Return the time of ``action`` on all ranks, and the CPU times of this thread and of all others."""
    dist.barrier()
    begin, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    action()
    thread, process = time.thread_time() - thread, time.process_time() - process
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3, thread * 1e3, (process - thread) * 1e3


def row_of(option: str, folder: str, mib: int, bucket_mib: int, rounds: int) -> dict[str, Any]:
    plain = local_optimizer(torch.optim.AdamW(parameters(mib), **OPTIONS[option]))
    offloaded = local_optimizer(torch.optim.AdamW(parameters(mib), **OPTIONS[option]))
    offload_optimizer(offloaded, folder, bucket_bytes=bucket_mib << 20)
    offloaded.step()  # makes the files
    times: dict[str, list[float]] = {name: [] for name in (*WALL, *CPU)}
    for turn in range(rounds + 2):
        found = dict.fromkeys(CPU, 0.0)
        found["plain"], found["plain CPU"], _ = milliseconds(plain.step)
        drop(offloaded)
        found["cold read"] = milliseconds(lambda: read_all(offloaded))[0]
        drop(offloaded)
        found["cold"] = milliseconds(offloaded.step)[0]
        found["warm"], found["step CPU"], found["files CPU"] = milliseconds(offloaded.step)
        for name, each in found.items():
            if turn >= 2:
                times[name].append(each)
    return {
        "AdamW": option,
        "state MiB": 2 * mib,
        "buckets": len(files(offloaded)),
        **{f"{name} ms": spread(taken) for name, taken in times.items()},
        "warm/plain": ratios(times["warm"], times["plain"]),
        "overlapped": ratios(list(map(max, times["step CPU"], times["files CPU"])), times["plain CPU"]),
        "of the disk": ratios(times["cold read"], times["cold"]),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    options.add_argument("--mib", type=int, default=256)
    options.add_argument("--bucket-mib", type=int, default=32)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mib, rounds = (16, 1) if arguments.quick else (arguments.mib, arguments.rounds)
    bucket_mib = 8 if arguments.quick else arguments.bucket_mib
    rows = [row_of(option, arguments.folder, mib, bucket_mib, rounds) for option in OPTIONS]
    if dist.get_rank() == 0:
        settings = {"ranks": dist.get_world_size(), "MiB of parameters": mib, "MiB of a bucket": bucket_mib}
        publish("optimizer state in files", settings, list(rows[0]), rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
