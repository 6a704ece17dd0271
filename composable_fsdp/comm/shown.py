"""Collectives that go past torch's dispatcher, for tools that watch it, such as ``CommDebugMode``."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["show"]


def show(label: str) -> None:
    """Where a tool watches, calls what the collective ``label`` is in torch, on one element and among one rank.

    The tool then counts it for the module that runs. What ``label`` names is its first word.
    """
    if not torch._C._len_torch_dispatch_stack():
        return
    group, element = _one_rank(), torch.ones(1)
    kind = label.partition(" ")[0]
    if kind == "all-gather":
        group._allgather_base(element, element).wait()
    elif kind == "reduce-scatter":
        group._reduce_scatter_base(element, element, dist.ReduceScatterOptions()).wait()
    elif kind == "all-reduce":
        group.allreduce([element]).wait()


@functools.cache
def _one_rank() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
