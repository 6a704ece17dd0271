"""Launches of collectives in traces, in torch's profiles, and in dispatch modes such as ``CommDebugMode``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from itertools import chain

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from composable_fsdp import trace
from composable_fsdp._core.comm import SUM, Around, Collective, Transfer, is_over_group
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work

_NAMES = {
    Collective.ALL_GATHER: "c10d::_allgather_base_",
    Collective.ALL_REDUCE: "c10d::allreduce_",
    Collective.ALL_TO_ALL: "c10d::alltoall_base_",
    Collective.BARRIER: "c10d::barrier",
    Collective.REDUCE_SCATTER: "c10d::_reduce_scatter_base_",
}
"""The names in profiles of torch's process groups."""


class Visible(Around):
    """Emits a trace event for each launch, and shows those that bypass torch's dispatcher as collectives of torch."""

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if trace.listeners and is_over_group(self.base):
            nbytes = sum(transfer.input.nbytes for transfer in transfers)
            trace.emit(trace.Operation.COLLECTIVE, label, nbytes)
        if self.traits.dispatches:
            return self.base.launch(kind, transfers, label, op)
        if self.size > 1 and torch._C._len_torch_dispatch_stack():
            notify_comm_debug(kind, label)
        if not profiler._is_profiler_enabled:
            return self.base.launch(kind, transfers, label, op)
        tensors = [(t.input,) if t.input is t.output else tuple(t) for t in transfers]
        details = {"bytes": sum(t.input.nbytes for t in transfers), "operation": label, "group": _group_of(label)}
        with _RecordFunctionFast(_NAMES[kind], list(chain.from_iterable(tensors)), details):
            return self.base.launch(kind, transfers, label, op)


def _group_of(label: str) -> str:
    """Return ``layers.0`` for ``all-gather of layers.0 in forward``."""
    return label.partition(" of ")[2].removesuffix(" in forward").removesuffix(" in backward")


def notify_comm_debug(kind: Collective, label: str) -> None:
    """Report a collective to an active dispatch mode such as ``CommDebugMode``. Call it if there is one.

    Calls torch's collective of this kind on one element in a process group of one rank. The mode then counts it for the
    running module. A barrier may be all that an all-gather needs in shared memory.
    """
    group, element = _single_rank_group(), torch.ones(1)
    if kind is Collective.ALL_GATHER or (kind is Collective.BARRIER and label.startswith("all-gather")):
        group._allgather_base(element, element).wait()
    elif kind is Collective.REDUCE_SCATTER:
        group._reduce_scatter_base(element, element, dist.ReduceScatterOptions()).wait()
    elif kind is Collective.ALL_REDUCE:
        group.allreduce([element]).wait()


@cache
def _single_rank_group() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
