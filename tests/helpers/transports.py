"""The transports between ranks of one host, as environments for ``run_ranks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tests._internals import Communicator, GlooCommunicator, Transfer, Watched

Environment = Mapping[str, str]

IN_COMMON: Environment = {}
"""Communicates through shared memory, and also keeps shards there where possible. This is the default for users."""

COPIES: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "copy"}
"""Communicates through shared memory. Every rank copies the data that it needs."""

SOCKETS: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "0"}
"""Communicates over gloo, like ranks on different hosts."""

TRANSPORTS = {"in common": IN_COMMON, "copies": COPIES, "sockets": SOCKETS}


def over_gloo(group: dist.ProcessGroup) -> Communicator:
    """Return the communicator for ranks without shared memory. Collective."""
    return Watched(GlooCommunicator(group), None)


def in_place(tensors: Sequence[torch.Tensor]) -> list[Transfer]:
    return [Transfer(tensor, tensor) for tensor in tensors]
