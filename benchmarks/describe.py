"""Measures sharding by a policy and ``describe`` of a meta model of 70 B parameters at 1024 simulated ranks.

    OMP_NUM_THREADS=1 python benchmarks/describe.py

The benchmark runs in one process on one core. Memory is the peak of the process, including Python and torch.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from libraries import fake_ranks
from models import FusedBlock
from report import parser, publish
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, describe, fully_shard
from composable_fsdp.diagnostics.describe import ModelDescription
from composable_fsdp.wrap import transformer_blocks

RANKS = 1024
LAYERS = 100
Row = dict[str, str | float]
T = TypeVar("T")


def build(layers: int) -> nn.Module:
    """Build a decoder like Llama, with 70 billion parameters in 100 layers."""
    with torch.device("meta"):
        blocks = [FusedBlock(8192, 21504, 1024) for _ in range(layers)]
        return nn.Sequential(nn.Embedding(128256, 8192), *blocks, nn.LayerNorm(8192), nn.Linear(8192, 128256))


def measure(layers: int, ranks: int) -> tuple[list[Row], ModelDescription]:
    """Return a row for each part, and the description."""
    rows: list[Row] = []

    def part(name: str, action: Callable[[], T]) -> T:
        begin, cpu = time.perf_counter(), time.process_time()
        result = action()
        rows.append(
            {
                "part": name,
                "wall s": round(time.perf_counter() - begin, 3),
                "cpu s": round(time.process_time() - cpu, 3),
                "most memory MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            }
        )
        return result

    with fake_ranks(ranks) as mesh:
        model = part("build on meta", lambda: build(layers))
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        part("shard", lambda: fully_shard(model, policy=transformer_blocks(), mesh=mesh, mp_policy=precision))
        description = part("describe", lambda: describe(model))
        part("print", lambda: str(description))
    return rows, description


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    layers = 10 if arguments.quick else LAYERS
    rows, description = measure(layers, RANKS)
    print(description)
    parameters = sum(group.parameters for group in description.groups)
    settings = {"ranks": RANKS, "layers": layers, "parameters": parameters}
    publish("describe", settings, ["part", "wall s", "cpu s", "most memory MB"], rows, arguments.out)


if __name__ == "__main__":
    main()
