"""Time of a training step against torch's FSDP2, FSDP1, DDP and no communication at all, step by step in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/step_time.py --cases gpt-256,gpt-32

All variants live in the same processes and take turns, so that what else the machine does falls on all of them. CPU
time is that of all threads of a rank, the mean over ranks; wall time the longest of all ranks. Ratios are of pairs of
neighbouring steps: medians with the middle half.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from models import CASES, Case
from report import show, spread, store
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import composable_fsdp as ours

WARM_UP = 3


def shard_by(library: Any, case: Case, mesh: DeviceMesh, *, bf16: bool) -> nn.Module:
    model = case.build()
    options: dict[str, Any] = {"mesh": mesh}
    if bf16:
        options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    blocks = case.blocks(model)
    for block in blocks:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)
    if library is peer:  # its documented way to overlap more
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return model


def shard_by_fsdp1(case: Case, mesh: DeviceMesh, *, bf16: bool) -> nn.Module:
    model = case.build()
    precision = peer.MixedPrecision(torch.bfloat16, torch.float32) if bf16 else None
    wrapped = {type(block) for block in case.blocks(model)}
    return peer.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(wrapped),
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def unsharded(case: Case, *, bf16: bool) -> nn.Module:
    model = case.build()
    return model.to(torch.bfloat16) if bf16 else model


VARIANTS: dict[str, Callable[..., nn.Module]] = {
    "ours": lambda case, mesh, bf16: shard_by(ours, case, mesh, bf16=bf16),
    "fsdp2": lambda case, mesh, bf16: shard_by(peer, case, mesh, bf16=bf16),
    "fsdp1": lambda case, mesh, bf16: shard_by_fsdp1(case, mesh, bf16=bf16),
    "ddp": lambda case, mesh, bf16: nn.parallel.DistributedDataParallel(unsharded(case, bf16=bf16)),
    "none": lambda case, mesh, bf16: unsharded(case, bf16=bf16),
}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(case: Case, names: list[str], rounds: int, *, bf16: bool) -> dict[str, Any]:
    """CPU and wall milliseconds of each variant's steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trained = {}
    for name in names:
        torch.manual_seed(0)
        model = VARIANTS[name](case, mesh, bf16)
        trained[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = case.batch(torch.Generator().manual_seed(dist.get_rank()))
    if bf16 and batch.is_floating_point():
        batch = batch.bfloat16()
    samples: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for turn in range(rounds + WARM_UP):
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            cpu, wall = cpu_seconds(), time.perf_counter()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken = torch.tensor([cpu_seconds() - cpu, time.perf_counter() - wall], dtype=torch.float64) * 1e3
            if turn >= WARM_UP:
                samples[name].append(taken)
    table = torch.stack([torch.stack(samples[name]) for name in names])
    cpu, wall = table[..., 0].contiguous(), table[..., 1].contiguous()
    dist.all_reduce(cpu)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    times = {"cpu": cpu / dist.get_world_size(), "wall": wall}
    row: dict[str, Any] = {"ranks": dist.get_world_size(), "bf16": bf16}
    for kind, of_all in times.items():
        of = dict(zip(names, of_all, strict=True))
        for name in names:
            row[f"{name} {kind} ms"] = spread(of[name].tolist())
            if name != "ours":
                row[f"ours/{name} {kind}"] = spread((of["ours"] / of[name]).tolist())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}; ours first")
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reduction")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in arguments.cases.split(","):
        variants = arguments.variants.split(",")
        row = {"case": name, "what": CASES[name].what}
        row |= measure(CASES[name], variants, arguments.rounds, bf16=arguments.bf16)
        rows.append(row)
        if dist.get_rank() == 0:
            ratios = (
                f"{other} cpu {show(row[f'ours/{other} cpu'])} wall {show(row[f'ours/{other} wall'])}"
                for other in variants[1:]
            )
            print(f"{name}, {dist.get_world_size()} ranks, ours against " + "; ".join(ratios), flush=True)
    if dist.get_rank() == 0:
        store("step time", " ".join(sys.argv), rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
