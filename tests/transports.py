"""Ways in which ranks of one host reach each other, as environments for ``run_ranks``."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COPIES", "IN_COMMON", "SOCKETS", "TRANSPORTS", "Environment"]

Environment = Mapping[str, str]

IN_COMMON: Environment = {}
"""Shared memory, with shards in memory that ranks have in common where that can be: what users get."""

COPIES: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "copy"}
"""Shared memory, from which every rank copies what it needs."""

SOCKETS: Environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": "0"}
"""Gloo, as between hosts."""

TRANSPORTS = {"in common": IN_COMMON, "copies": COPIES, "sockets": SOCKETS}
