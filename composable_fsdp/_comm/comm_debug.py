"""Make collectives that bypass torch's dispatcher visible to ``CommDebugMode`` and the profiler."""

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

__all__ = ["notify_comm_debug", "profiled"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    "all_gather": "c10d::_allgather_base_",
    "all_reduce": "c10d::allreduce_",
    "all_to_all": "c10d::alltoall_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}
"""The names in profiles of torch's process groups, by method of a communicator."""


def profiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a communicator so that profiles show its launch as torch's collective of the same kind.

    With ``record_shapes=True`` profiles also show the output and input of each transfer, the bytes of the inputs, and
    the parameter groups.
    """
    name = _NAMES[function.__name__]

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiler._is_profiler_enabled:
            return function(*args, **kwargs)
        operands, label = cast("Sequence[Any]", args[1]), str(kwargs.get("label", args[-1]))
        transfers = [(each,) if isinstance(each, torch.Tensor) else tuple(each) for each in operands]
        nbytes = sum(transfer[-1].nbytes for transfer in transfers)
        details = {"bytes": nbytes, "operation": label, "group": _group_of(label)}
        with _RecordFunctionFast(name, list(chain.from_iterable(transfers)), details):
            return function(*args, **kwargs)

    return wrapper


def _group_of(label: str) -> str:
    """Return ``layers.0`` for ``all-gather of layers.0 in forward``."""
    return label.partition(" of ")[2].removesuffix(" in forward").removesuffix(" in backward")


def notify_comm_debug(label: str) -> None:
    """Report the collective ``label`` to an active dispatch mode such as ``CommDebugMode``. Call it if there is one.

    Calls torch's collective of the kind that the first word of ``label`` names, on one element in a process group of
    one rank. The mode then counts it for the running module.
    """
    group, element = _single_rank_group(), torch.ones(1)
    kind = label.partition(" ")[0]
    if kind == "all-gather":
        group._allgather_base(element, element).wait()
    elif kind == "reduce-scatter":
        group._reduce_scatter_base(element, element, dist.ReduceScatterOptions()).wait()
    elif kind == "all-reduce":
        group.allreduce([element]).wait()


@functools.cache
def _single_rank_group() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
