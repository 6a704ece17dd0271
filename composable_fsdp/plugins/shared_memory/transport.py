"""The transport in memory that the ranks of one host share."""

from __future__ import annotations

import torch.distributed as dist

from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._comm.factory import has_own_transports
from composable_fsdp.plugins.shared_memory.connect import connect
from composable_fsdp.plugins.shared_memory.shm_communicator import SharedMemoryCommunicator

__all__ = ["in_shared_memory"]


def in_shared_memory(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    """Return a communicator for CPU tensors over gloo if all ranks are on one host, and the user has not refused."""
    engine = connect(group) if has_own_transports(group, device_type) else None
    return None if engine is None else SharedMemoryCommunicator(group, engine)
