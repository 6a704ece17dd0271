"""Measures how host time grows with groups, parameters of a group, and ranks, beside torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/growth.py

The process group is fake, so the CPU time is that of the host. One size grows while the others stay: groups of 4
parameters on 8 ranks, parameters of 10 groups on 8 ranks, ranks of 10 groups of 4 parameters. Each parameter has 4096
rows, so that no rank has padding. The exponent of a part is the slope of a straight line through the logarithms of its
times: 1 is proportional to the size, and 0 does not depend on it. Small models run before, so that no figure has what
the process pays once. ``plan`` is ours alone.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import linear_regression
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks, shard
from report import interleaved, parser, publish, spread
from torch import nn

from composable_fsdp.plan import plan
from composable_fsdp.wrap import by_class

ROWS = 4096
GROUPS, PARAMETERS, RANKS = 10, 4, 8
SIZES = {"groups": (10, 100, 1000), "parameters": (1, 10, 100), "ranks": (8, 64, 512, 4096)}
PARTS = ("fully_shard", "first step", "steady step", "state_dict")
STEADY = 3


class Layer(nn.Module):
    """One group of ``parameters`` vectors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(ROWS) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def build(groups: int, parameters: int) -> nn.Module:
    return nn.Sequential(*(Layer(parameters) for _ in range(groups)))


def milliseconds(action: Callable[[], object]) -> float:
    """Return the CPU time of ``action``, after a garbage collection."""
    gc.collect()
    begin = time.process_time()
    action()
    return (time.process_time() - begin) * 1e3


def times(library: str, groups: int = GROUPS, parameters: int = PARAMETERS, ranks: int = RANKS) -> dict[str, float]:
    """Return the milliseconds of each of ``PARTS``."""
    x = torch.ones(1, ROWS, requires_grad=True)
    with fake_ranks(ranks) as mesh:
        model = build(groups, parameters)
        blocks = list(model.children())

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        taken = {
            "fully_shard": milliseconds(lambda: shard(LIBRARIES[library], model, blocks, mesh, bf16=False)),
            "first step": milliseconds(step),
            "steady step": min(milliseconds(step) for _ in range(STEADY)),
        }
        return taken | {"state_dict": milliseconds(model.state_dict)}


def times_of_plan(groups: int = GROUPS, parameters: int = PARAMETERS, ranks: int = RANKS) -> dict[str, float]:
    make = partial(build, groups, parameters)
    return {"plan": milliseconds(lambda: plan(make, f"1x{ROWS}:float32", mesh=str(ranks), policy=by_class(Layer)))}


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """Return the slope of ``values`` over ``sizes``, both as logarithms."""
    return linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values]).slope


def rows_of(grows: str, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each part of each library: the median at each size, and the exponent."""
    medians: dict[tuple[str, str], list[float]] = {}
    for size in sizes:
        of: dict[str, Callable[[], dict[str, float]]] = {
            library: partial(times, library, **{grows: size}) for library in LIBRARIES
        }
        of["ours, plan"] = partial(times_of_plan, **{grows: size})
        for library, samples in interleaved(of, rounds, warm_up=0).items():
            for part in samples[0]:
                median = spread([sample[part] for sample in samples])["median"]
                medians.setdefault((part, library.partition(",")[0]), []).append(median)
    return [
        {
            "grows": f"{grows} {sizes[0]} to {sizes[-1]}",
            "part": part,
            "library": library,
            "first ms": values[0],
            "last ms": values[-1],
            "exponent": exponent(sizes, values),
            "exponent at the end": exponent(sizes[-2:], values[-2:]),
        }
        for (part, library), values in sorted(medians.items())
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--grows", default=",".join(SIZES), help="the sizes that grow, of " + ", ".join(SIZES))
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if arguments.quick else arguments.rounds
    times_of_plan()
    for library in LIBRARIES:
        times(library)
    rows = [
        row
        for grows in arguments.grows.split(",")
        for row in rows_of(grows, SIZES[grows][:2] if arguments.quick else SIZES[grows], rounds)
    ]
    settings = {"groups": GROUPS, "parameters": PARAMETERS, "ranks": RANKS}
    publish("growth of host time", settings, list(rows[0]), rows, arguments.out)


if __name__ == "__main__":
    main()
