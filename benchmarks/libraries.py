"""The two libraries that provide ``fully_shard``, with equal use: this library and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable_fsdp

LIBRARIES: dict[str, ModuleType] = {"ours": composable_fsdp, "fsdp2": fsdp2}


def shard(
    library: ModuleType,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    bf16: bool,
    **options: Any,
) -> None:
    """Make a group of each of ``blocks`` and one of the rest. With ``bf16``, gradients are reduced in fp32."""
    options["mesh"] = mesh
    if bf16:
        options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)


def prefetch_explicitly(blocks: Sequence[Any], ahead: int = 1) -> None:
    """Make each of ``blocks`` prefetch the next ``ahead`` blocks, which FSDP2 documents for more overlap."""
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, place - ahead) : place][::-1]))


@contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """Return a mesh of ``size`` ranks in one process. Nothing is sent; only the shapes of results are right."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()
