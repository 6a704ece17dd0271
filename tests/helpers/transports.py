"""The transports between ranks of one host, as environments for ``run_ranks``."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from tests._internals import GlooCommunicator, GlooConnection, OrderCheck

__all__ = ["COPIES", "IN_COMMON", "SOCKETS", "TRANSPORTS", "Environment", "over_gloo"]

Environment = Mapping[str, str]

IN_COMMON: Environment = {}
"""Shared memory, with shards in memory that ranks have in common where that can be: what users get."""

COPIES: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "copy"}
"""Shared memory, from which every rank copies what it needs."""

SOCKETS: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "0"}
"""Gloo, as between hosts."""

TRANSPORTS = {"in common": IN_COMMON, "copies": COPIES, "sockets": SOCKETS}


def over_gloo(group: dist.ProcessGroup) -> GlooCommunicator:
    """Return the communicator for ranks without shared memory. Collective."""
    return GlooCommunicator(group, GlooConnection(group, None, OrderCheck.OFF))
