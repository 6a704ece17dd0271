"""Flight recorder: keeps the last events of every rank, writes them to a file on an error, and compares ranks.

It is off by default, because recording takes time. To turn it on::

    COMPOSABLE_FSDP_DIAGNOSTICS=runs/diagnostics torchrun ...

Every rank then writes ``rank-00000.jsonl`` to that folder on an error, SIGTERM or SIGUSR1. ``python -m
composable_fsdp.diagnostics merge runs/diagnostics`` shows the ranks side by side.
"""

from __future__ import annotations

from composable_fsdp.diagnostics._recording import disable, dump, enable

__all__ = ["disable", "dump", "enable"]
