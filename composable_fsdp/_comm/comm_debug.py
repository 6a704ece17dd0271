"""Collectives that go past torch's dispatcher, for tools that watch it: ``CommDebugMode`` and the profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

__all__ = ["profiled", "show"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    "all_gather": "c10d::_allgather_base_",
    "all_reduce": "c10d::allreduce_",
    "all_to_all": "c10d::alltoall_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}
"""What profiles of torch's process groups call the methods of a communicator."""


def profiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method of a communicator: profiles show its launch as that of torch's collective of this kind.

    With ``record_shapes=True`` they show its tensors too (of each transfer the output and the input), the bytes of the
    inputs, and the parameter groups.
    """
    name = _NAMES[function.__name__]

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiler._is_profiler_enabled:
            return function(*args, **kwargs)
        moved, label = cast("Sequence[Any]", args[1]), str(kwargs.get("label", args[-1]))
        transfers = [(each,) if isinstance(each, torch.Tensor) else tuple(each) for each in moved]
        nbytes = sum(transfer[-1].nbytes for transfer in transfers)
        details = {"bytes": nbytes, "operation": label, "group": _group_in(label)}
        with _RecordFunctionFast(name, list(chain.from_iterable(transfers)), details):
            return function(*args, **kwargs)

    return run


def _group_in(label: str) -> str:
    """``layers.0`` in ``all-gather of layers.0 in forward``."""
    return label.partition(" of ")[2].removesuffix(" in forward").removesuffix(" in backward")


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
