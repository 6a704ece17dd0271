"""Measures CPU time of optimizer steps and clipping, per parameter, on plain tensors, DTensors and local shards.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py

The model is one group of equal parameters on the fake process group, so nothing is sent. Variants run in turn. "local"
is ``local_optimizer``. The last rows show the fp32 error of a single norm of a flat store, which clipping avoids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import parser, publish, ratios, spread
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import clip_grad_norm_, fully_shard, local_optimizer, set_local_steps

WORLD = 2
SIZES = {16: 200, 16384: 200, 1 << 20: 6}
"""Pairs of the elements of a shard and the number of shards."""
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Scales(nn.Module):
    """One group of equal vectors."""

    def __init__(self, numel: int, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(numel) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * scale).sum() for scale in self.scales]).sum()


def sharded(numel: int) -> nn.Module:
    """Return a model with shards of ``numel`` elements, and gradients like those after a backward."""
    model = fully_shard(Scales(numel * WORLD, SIZES[numel]))
    model(torch.randn(numel * WORLD)).backward()
    return model


def plain(numel: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(numel)) for _ in range(SIZES[numel])]
    for parameter in parameters:
        parameter.grad = torch.randn(numel)
    return parameters


def microseconds(variants: dict[str, Callable[[], Any]], rounds: int, count: int) -> dict[str, list[float]]:
    """Return the CPU time of each call, per parameter. No call waits."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, variant in variants.items():
            begin = time.process_time()
            variant()
            if turn >= 2:
                samples[name].append((time.process_time() - begin) * 1e6 / count)
    return samples


def steps(numel: int, option: str, rounds: int) -> dict[str, Any]:
    set_local_steps(False)  # of the optimizer on DTensors

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **OPTIONS[option])

    models = sharded(numel), sharded(numel)
    optimizers = {
        "plain": make(plain(numel)),
        "DTensor": make(models[0].parameters()),
        "local": local_optimizer(make(models[1].parameters())),
    }
    taken = microseconds({name: optimizer.step for name, optimizer in optimizers.items()}, rounds, SIZES[numel])
    return {
        "what": f"AdamW {option}",
        "local/DTensor": ratios(taken["local"], taken["DTensor"]),
        **{f"{n} us": spread(t) for n, t in taken.items()},
    }


def clips(numel: int, rounds: int) -> dict[str, Any]:
    """Clip gradients. ``flat`` is the lower bound: one norm and one multiplication for all, without checks."""
    lists = plain(numel), list(sharded(numel).parameters()), list(sharded(numel).parameters())
    flat = torch.randn(numel * SIZES[numel])
    taken = microseconds(
        {
            "plain": lambda: nn.utils.clip_grad_norm_(lists[0], 1.0),
            "DTensor": lambda: nn.utils.clip_grad_norm_(lists[1], 1.0),
            "local": lambda: clip_grad_norm_(lists[2], 1.0),
            "flat": lambda: flat.mul_(torch.clamp(1.0 / torch.linalg.vector_norm(flat), max=1.0)),
        },
        rounds,
        SIZES[numel],
    )
    return {
        "what": "clip",
        "local/DTensor": ratios(taken["local"], taken["DTensor"]),
        **{f"{n} us": spread(t) for n, t in taken.items()},
    }


def norm_errors(numel: int) -> dict[str, Any]:
    """Return relative errors of the fp32 norm of ``numel`` random elements, computed at once or in pieces of 16 Ki."""
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    exact = flat.double().norm()
    pieces = torch.stack(torch._foreach_norm(list(flat.split(1 << 14)))).double().norm()
    errors = {"one norm": torch.linalg.vector_norm(flat), "norms of pieces": pieces}
    return {"what": "error", "elements": numel} | {n: abs(float(v / exact) - 1) for n, v in errors.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    rounds = 5 if arguments.quick else arguments.rounds
    rows: list[dict[str, Any]] = []
    for numel, count in SIZES.items():
        of_size = [*(steps(numel, option, rounds) for option in OPTIONS), clips(numel, rounds)]
        rows += [{"elements": numel, "parameters": count, **row} for row in of_size]
    columns = ["elements", "parameters", "what", "plain us", "DTensor us", "local us", "flat us", "local/DTensor"]
    publish("optimizer step and clipping, per parameter", {"ranks": WORLD}, columns, rows, arguments.out)
    for numel in (10**5, 10**6, 10**7, 3 * 10**7):
        print("  ".join(f"{n} {v:.1e}" if isinstance(v, float) else f"{n} {v}" for n, v in norm_errors(numel).items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
