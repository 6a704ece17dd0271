"""Host time that sharding adds to one group's forward and backward, against torch's FSDP2, on the fake process group.

    OMP_NUM_THREADS=1 python benchmarks/host_overhead.py

Nothing is sent and the tensors are tiny, so what is left is Python. Both libraries run step by step in turn; overhead
is the step less that of the same model without sharding, per group.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from report import show, spread, store
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable_fsdp as ours

GROUPS = 12
WORLD = 4


class Layer(nn.Module):
    """One group of ``parameters`` small vectors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(16) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def build(parameters: int, shard: Callable[..., object] | None, options: dict[str, object]) -> nn.Module:
    model = nn.Sequential(*(Layer(parameters) for _ in range(GROUPS)))
    if shard is not None:
        for layer in model:
            shard(layer, **options)
        shard(model, **options)
    return model


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - begin


def measure(parameters: int, mesh: DeviceMesh, rounds: int) -> dict[str, object]:
    models = {
        "unsharded": build(parameters, None, {}),
        "ours": build(parameters, ours.fully_shard, {"mesh": mesh}),
        "fsdp2": build(parameters, peer.fully_shard, {"mesh": mesh}),
    }
    x = torch.randn(4, 16, requires_grad=True)
    samples: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 5):
        for name, model in models.items():
            taken = step_seconds(model, x)
            if turn >= 5:
                samples[name].append(taken / GROUPS * 1e6)
            for parameter in model.parameters():
                parameter.grad = None
    base = spread(samples["unsharded"])["median"]
    ratio = [(a - base) / (b - base) for a, b in zip(samples["ours"], samples["fsdp2"], strict=True)]
    return {
        "parameters": parameters,
        "ours_us": spread([t - base for t in samples["ours"]]),
        "fsdp2_us": spread([t - base for t in samples["fsdp2"]]),
        "ratio": spread(ratio),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    rows = []
    for parameters in (1, 4, 12, 48):
        row = measure(parameters, mesh, arguments.rounds)
        rows.append(row)
        print(
            f"{parameters:3d} parameters  ours {show(row['ours_us'], 0)} us  fsdp2 {show(row['fsdp2_us'], 0)} us  "
            f"ratio {show(row['ratio'])}",
            flush=True,
        )
    store("host overhead per group", " ".join(sys.argv), rows, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
