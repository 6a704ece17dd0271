"""Compares the order of six settings by the step times that ``plan`` predicts with their order on two real ranks.

    python benchmarks/plan_order.py  # as root, for the network

The ranks train a GPT with each of the ``SETTINGS`` of ``plan_resident.py`` in turn, step by step, over sockets between
network namespaces with a limited rate (``sim/lab.py``). The plans know the rate, and the speed of one core in a matrix
product and in a copy, which is measured first. A pair of settings has an order if the intervals of their measured times
do not overlap.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Gpt
from network import rows_over
from plan_resident import SETTINGS, options_of
from report import interleaved, parser, publish, timed
from sim.lab import Link, lacking
from tables import spread
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.plan import Accelerator, plan

RANKS, ROUNDS = 2, 8
BATCH = (4, 64)
LINK = Link(400, 0.05)
COLUMNS = ["settings", "predicted ms", "measured ms", "predicted/measured", "predicted place", "measured place"]


def build() -> nn.Module:
    return Gpt(2048, 384, 4)


def step_of(settings: dict[str, Any]) -> Callable[[], None]:
    """Return a training step of a model of its own."""
    torch.manual_seed(0)
    model: Any = fully_shard(build(), **options_of(settings))
    if settings.get("recompute"):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randint(0, model.embedding.num_embeddings, BATCH)

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank(names: list[str], rounds: int, out: Path) -> None:
    """Write the milliseconds of each step of the slowest rank, by settings. Runs on each rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = interleaved({name: timed(step_of(SETTINGS[name])) for name in names}, rounds)
    taken = torch.tensor([samples[name] for name in names])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        rows = [{"settings": name, "ms": ms} for name, ms in zip(names, taken.tolist(), strict=True)]
        out.write_text(json.dumps({"rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def seconds_of(action: Callable[[], object]) -> float:
    """Return the least seconds of several runs."""
    taken = []
    for _ in range(10):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def this_core() -> Accelerator:
    """Return the measured speed of one core, with the rate of the network."""
    rows, dim = BATCH[0] * BATCH[1], 384
    x, weight = torch.randn(rows, dim), torch.randn(dim, 4 * dim)
    tflops = 2 * rows * dim * 4 * dim / seconds_of(lambda: x @ weight) / 1e12
    source = torch.randn(4 * 2**20)
    target = torch.empty_like(source)
    gb_s = 2 * source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9
    return Accelerator(
        name="this core",
        tflops=tflops,
        tflops_fp32=tflops,
        memory_gb_s=gb_s,
        efficiency=1.0,
        gib=16,
        gbit=LINK.mbit / 1e3,
        latency_us=1e3 * LINK.delay_ms + 200,
        has_streams=False,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--timeout", type=float, default=600)
    arguments = options.parse_args()
    names = list(SETTINGS)[:2] if arguments.quick else list(SETTINGS)
    rounds = 2 if arguments.quick else ROUNDS
    if "RANK" in os.environ:
        on_rank(names, rounds, arguments.out)
        return
    if missing := lacking():
        print(f"left out: it needs {missing}")
        return
    torch.set_num_threads(1)
    core = this_core()
    print(core)
    script = [sys.executable, __file__, *["--quick"] * arguments.quick]
    measured = {row["settings"]: spread(row["ms"]) for row in rows_over(LINK, RANKS, script, arguments.timeout)}
    predicted = {name: seconds_by_plan(SETTINGS[name], core) for name in names}
    rows = rows_of(predicted, measured)
    settings = {"ranks": RANKS, "dtype": "fp32", "optimizer": "sgd", "Mbit/s": LINK.mbit}
    publish("predicted and measured order of settings", settings, COLUMNS, rows, arguments.out)
    wrong = [pair for pair in ordered_pairs(measured) if predicted[pair[0]] >= predicted[pair[1]]]
    print(f"pairs with a measured order: {len(ordered_pairs(measured))}, predicted in another order: {wrong or 0}")


def seconds_by_plan(settings: dict[str, Any], core: Accelerator) -> float:
    return plan(
        build,
        "x".join(map(str, BATCH)),
        mesh=str(RANKS),
        device=core,
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        recompute=settings.get("recompute", False),
        **options_of(settings),
    ).seconds


def rows_of(predicted: dict[str, float], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each settings, the fastest measured ones first."""
    by_plan = sorted(predicted, key=lambda name: predicted[name])
    by_time = sorted(measured, key=lambda name: measured[name]["median"])
    return [
        {
            "settings": name,
            "predicted ms": 1e3 * predicted[name],
            "measured ms": measured[name],
            "predicted/measured": 1e3 * predicted[name] / measured[name]["median"],
            "predicted place": by_plan.index(name) + 1,
            "measured place": place,
        }
        for place, name in enumerate(by_time, 1)
    ]


def ordered_pairs(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of settings whose intervals do not overlap, the faster one first."""
    pairs = [(a, b) for a, b in combinations(measured, 2)]
    pairs += [(b, a) for a, b in pairs]
    return [(a, b) for a, b in pairs if measured[a]["high"] < measured[b]["low"]]


if __name__ == "__main__":
    main()
