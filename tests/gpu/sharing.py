"""Ranks on GPUs, also where there are fewer GPUs than ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def set_device() -> None:
    """Set the device of this rank. Call it before the first collective. NCCL refuses two ranks of one host on one GPU.
    Where ranks share a GPU, each gets another name of its host, so that they communicate through sockets, as ranks of
    several hosts do. Their kernels take turns on the GPU."""
    rank, count = dist.get_rank(), torch.cuda.device_count()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % count)
    if int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) > count:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def mesh_on(device: str, *names: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Return a mesh of all ranks, each on its own device: of one dim, or of two dims, with these names. The first of
    two dims has two ranks, and the second one the others."""
    if device == "cuda":
        set_device()
    backends = f"cpu:gloo,{device}:{dist.Backend.default_device_backend_map[device]}"
    options: dict[str, Any] = {"backend": "gloo" if device == "cpu" else backends, "timeout": timeout}
    if not names:
        return DeviceMesh.from_group(dist.new_group(**options), device)
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    groups = []
    for dim in (ranks.T, ranks):
        made = [dist.new_group(each.tolist(), **options) for each in dim]
        groups.append(next(group for group in made if dist.get_rank(group) >= 0))
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Ignore warnings of torch and of what it imports, which the tests take for errors."""
    with catch_warnings():
        filterwarnings("ignore", module=r"(torch|triton)\.")
        filterwarnings("ignore", "Synchronization debug mode")
        yield
