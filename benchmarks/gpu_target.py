"""What the sections of ``gpu_report.py`` share: the devices of this machine, and a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.gpu.sharing import set_device
from tests.simulation import BACKEND, simulated_accelerator
from tests.simulation.accelerator import active
from tests.simulation.nccl import stands_in

__all__ = [
    "MB",
    "OURS",
    "PAIR",
    "PEER",
    "TOLERANCE",
    "Target",
    "adam",
    "batch_of",
    "build",
    "last_error",
    "sharded",
    "step",
    "width_of",
]

TOLERANCE = 2e-4
MB = 1 << 20
OURS, PEER = "ours", "fsdp2"
PAIR = 2
"""The ranks of a pair. On one GPU they share it."""


def last_error(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


@dataclass(frozen=True)
class Target:
    """The devices of this machine: ``"cuda"`` or ``"simulated"``, their number and their name."""

    device: str
    count: int
    name: str

    @staticmethod
    def find(device: str) -> Target:
        if device == "simulated":
            return Target(device, 1, "simulated")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return Target(device, count, torch.cuda.get_device_name(0) if count else "no GPU")

    @property
    def type(self) -> str:
        """The device type of tensors."""
        return "cuda" if self.device == "cuda" else "cpu"

    @contextmanager
    def mesh(self, stand_in: str = "", *, bound: bool = False) -> Iterator[DeviceMesh]:
        """Make a mesh of all ranks; with fewer GPUs than ranks they share them.

        Args:
            stand_in: on a simulated device, the variant of the stand-in for NCCL; ``"gloo"`` for no simulation.
            bound: bind the default process group to the device of this rank.
        """
        if self.device == "simulated" and stand_in == "gloo":
            yield DeviceMesh("cpu", list(range(dist.get_world_size())))
            return
        if self.device == "simulated":
            with ExitStack() as stack:
                backend = BACKEND
                if stand_in:
                    backend = stack.enter_context(stands_in(stand_in, bound=bound)).backend
                group = dist.new_group(backend=backend)
                stack.enter_context(simulated_accelerator())
                yield DeviceMesh.from_group(group, "cpu")
            return
        set_device()
        if bound:
            rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            again = dist.PrefixStore("bound", store)
            dist.init_process_group(
                "nccl",
                store=again,
                rank=rank,
                world_size=size,
                device_id=torch.device("cuda", torch.cuda.current_device()),
            )
        yield DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")

    def captured(self, run: Callable[[], torch.Tensor], times: int) -> list[float]:
        """Capture ``run`` into a CUDA graph, replay it ``times``, and return the results.

        A simulated device has no graphs: each time is a capture, which runs at once.
        """
        found = []
        if self.device == "simulated":
            for _ in range(times):
                torch.cpu.synchronize()
                side: Any = torch.cpu.Stream()
                with torch.cpu.stream(side), active[-1].capture():
                    result = run()
                torch.cpu.synchronize()
                found.append(float(result))
            return found
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        for _ in range(times):
            graph.replay()
            torch.cuda.synchronize()
            found.append(float(result))
        return found

    def shared(self, ranks: int) -> str:
        """Say how the ranks are placed on the devices."""
        if self.device == "simulated":
            return "simulated"
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # of this host, under torchrun
        return "one each" if here <= self.count else f"{here} ranks on {self.count}"

    @property
    def most(self) -> int:
        """The ranks of a section that needs several: one for each device, and at least a pair."""
        return max(PAIR, self.count)

    def ranks(self) -> list[int]:
        """The numbers of ranks to compare: one, a pair, and one for each device."""
        return sorted({1, PAIR, self.most})

    def synchronize(self) -> None:
        torch.get_device_module(self.type).synchronize()


# -- models


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def build(width: int, depth: int = 4) -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def width_of(target: Target) -> int:
    return 2048 if target.device == "cuda" else 64


def batch_of(target: Target, rank: int, step: int, width: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator).to(target.type)


def sharded(
    target: Target,
    library: str,
    mesh: DeviceMesh,
    width: int,
    *,
    bf16: bool = False,
    convert: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: Any,
) -> nn.Module:
    """Return a sharded model of 4 blocks, which ``convert`` changes before it is sharded."""
    model: Any = convert(build(width).to(target.type))
    shard(LIBRARIES[library], model, list(model), mesh, bf16=bf16, **options)
    return cast(nn.Module, model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
