"""What each rank did last, written down when something goes wrong, and ranks compared.

Off unless asked for, since to record costs time. Asked for by::

    COMPOSABLE_FSDP_DIAGNOSTICS=runs/diagnostics torchrun ...

every rank writes ``rank-00000.jsonl`` there on an error, SIGTERM or SIGUSR1. ``python -m composable_fsdp.diagnostics
merge runs/diagnostics`` shows them side by side.
"""

from __future__ import annotations

from composable_fsdp.diagnostics._recording import disable, dump, enable

__all__ = ["disable", "dump", "enable"]
