"""The transport in memory that the ranks of one host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from composable_fsdp._core.comm import (
    DONE,
    SUM,
    Collective,
    GroupCommunicator,
    OverGroup,
    Traits,
    Transfer,
    has_own_transports,
)
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work
from composable_fsdp.errors import PeerError, UnsupportedError
from composable_fsdp.plugins.shared_memory.collective import Barrier, StagedCollective
from composable_fsdp.plugins.shared_memory.connect import connect, reconnect
from composable_fsdp.plugins.shared_memory.engine import ShmEngine
from composable_fsdp.plugins.shared_memory.segment import Segment

_ZERO_COPY_BYTES = 1 << 18
"""Zero-copy and copied-in transfers cost the same at this size (2 and 4 ranks, ``benchmarks/collectives.py``)."""


def in_shared_memory(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    """Return a communicator for CPU tensors over gloo if all ranks are on one host, and the user has not refused."""
    engine = connect(group) if has_own_transports(group, device_type) else None
    return None if engine is None else SharedMemoryCommunicator(group, engine)


class SharedMemoryCommunicator(OverGroup):
    """Collectives of CPU tensors between ranks on one host.

    Sums are accumulated in fp32 and in rank order and are bitwise identical to those over gloo. Waiting for an
    operation also completes those launched before it.

    Args:
        group: the process group.
        engine: the engine of ``group``, which all communicators of the group on this rank share.
    """

    def __init__(self, group: dist.ProcessGroup, engine: ShmEngine) -> None:
        super().__init__(group)
        self.traits = Traits(
            widens=True, aliases=engine.aliases, coalesces=True, checks=True, zero_copy_min_bytes=_ZERO_COPY_BYTES
        )
        self.engine = engine

    @property
    def generation(self) -> int:
        return self.engine.generation

    @property
    def launched(self) -> int:
        return self.engine.launched

    @property
    def is_broken(self) -> bool:
        return bool(self.engine.broken)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if op is not ReduceOp.SUM:
            raise UnsupportedError("a communicator in shared memory does not average: look at its traits, or divide.")
        label = label or kind.label
        if kind is Collective.BARRIER:
            return self.engine.launch(Barrier(label))
        if not transfers:
            return DONE
        return self.engine.launch(StagedCollective(kind, self.rank, self.size, transfers, label))

    def check(self) -> None:
        self.engine.check()

    def give_up(self, reason: str) -> None:
        self.engine.give_up(PeerError(reason))

    def abandon(self) -> None:
        """Do nothing: only this rank writes to its memory, so work in flight need not be aborted."""

    def reopen(self) -> None:
        reconnect(self.group, self.engine)

    def share(self, nbytes: int) -> torch.Tensor:
        """Return zeros that all ranks share. Pages take memory once written, until no rank has a view of the tensor.

        Raises:
            OSError: no such memory is available. The other ranks raise ``PeerError``.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            segment = Segment(nbytes) if self.rank == 0 else None
        except OSError as error:
            self.engine.give_up(error, "sharing of memory")
            raise
        barrier = Barrier("sharing of memory", nbytes, segment)
        self.engine.launch(barrier).wait()
        return barrier.memories[0]
