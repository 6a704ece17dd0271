"""Measures the CPU time of a step of Muon: of ours, of torch's on DTensors, and of torch's on the unsharded model.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/muon.py

Parameters are the matrices of decoder blocks, with gradients set once. Times are those of the process, of all its
threads, so that waiting costs nothing and other programs on the machine count little. Variants run in turn. ``load`` is
the largest part of the Newton-Schulz operations that one rank computes: 1 over the ranks at best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from report import parser, publish, ratios, spread
from torch import nn

from composable_fsdp import Muon, fully_shard

SIZES = {256: 4, 384: 4}
"""The width of a block, and the number of blocks."""


class Block(nn.Module):
    """The matrices of a decoder block of ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11 // 4
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 4, bias=False), nn.Linear(width, width // 4, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


def blocks(width: int, *, shard: bool) -> list[nn.Parameter]:
    """Return parameters with gradients, the same for every call."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(SIZES[width])))
    for parameter in model.parameters():
        parameter.data *= 0.1
    if shard:
        for block in model:
            fully_shard(block)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    return parameters


def measured(step: Callable[[], Any]) -> tuple[float, int]:
    """Return the milliseconds of CPU time of a step, and its collectives."""
    calls = 0
    original = dist.all_to_all_single

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **options)

    dist.barrier()
    with mock.patch.object(dist, "all_to_all_single", counting):
        begin = time.process_time()
        step()
        return (time.process_time() - begin) * 1e3, calls


def row_of(width: int, rounds: int) -> dict[str, Any]:
    ours = Muon(blocks(width, shard=True), lr=1e-3)
    variants: dict[str, torch.optim.Optimizer] = {
        "ours": ours,
        "DTensor": torch.optim.Muon(blocks(width, shard=True), lr=1e-3),
        "unsharded": torch.optim.Muon(blocks(width, shard=False), lr=1e-3),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    calls = 0
    for turn in range(rounds + 1):
        for name, optimizer in variants.items():
            milliseconds, counted = measured(optimizer.step)
            calls = counted if name == "ours" else calls
            if turn:
                times[name].append(milliseconds)
    ((_, exchanges),) = ours._plans._plans.values()
    ((exchange, _),) = exchanges
    costs = [unit.cost for unit in exchange.units]
    loads = [
        sum(c for c, o in zip(costs, exchange.owners, strict=True) if o == r) for r in range(dist.get_world_size())
    ]
    return {
        "width": width,
        "matrices": len(costs),
        **{f"{name} ms": spread(taken) for name, taken in times.items()},
        "ours/unsharded": ratios(times["ours"], times["unsharded"]),
        "ours/DTensor": ratios(times["ours"], times["DTensor"]),
        "load": round(max(loads) / sum(loads), 3),
        "collectives": calls,
        "buckets": len(exchange.buckets),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--widths", default=",".join(map(str, SIZES)))
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    widths = [256] if arguments.quick else [int(width) for width in arguments.widths.split(",")]
    rows = [row_of(width, 2 if arguments.quick else arguments.rounds) for width in widths]
    if dist.get_rank() == 0:
        publish("step of Muon", {"ranks": dist.get_world_size()}, list(rows[0]), rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
