"""Flight recorder: keeps the last events of every rank, writes them to a file on an error, and compares ranks.

It is off by default, because recording takes time. To turn it on::

    COMPOSABLE_FSDP_DIAGNOSTICS=runs/diagnostics torchrun ...

Every rank then writes ``rank-00000.json`` to that folder on an error, SIGTERM or SIGUSR1. ``composable-fsdp
diagnostics runs/diagnostics`` shows the ranks side by side.

:func:`write_timeline` writes recorded events as a timeline; ``COMPOSABLE_FSDP_TIMELINE`` records them.
:class:`Meter` measures speed, MFU, memory and exposed communication.
"""

from __future__ import annotations

from composable_fsdp.diagnostics.communication_report import CommunicationReport, CommunicationRow
from composable_fsdp.diagnostics.describe import GroupDescription, ModelDescription
from composable_fsdp.diagnostics.fault_file import disable, dump, enable
from composable_fsdp.diagnostics.meters import Meter, Reading
from composable_fsdp.diagnostics.timeline import write_timeline

__all__ = [
    "CommunicationReport",
    "CommunicationRow",
    "GroupDescription",
    "Meter",
    "ModelDescription",
    "Reading",
    "disable",
    "dump",
    "enable",
    "write_timeline",
]
