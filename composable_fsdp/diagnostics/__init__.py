"""Descriptions, timelines and meters of sharded models.

``COMPOSABLE_FSDP_TIMELINE=folder`` records a run, and ``composable-fsdp timeline folder`` draws it;
:func:`write_timeline` writes events that a ``Recorder`` has. :class:`Meter` measures speed, MFU, memory and exposed
communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composable_fsdp._first_use import FirstUse

if TYPE_CHECKING:
    from composable_fsdp.diagnostics.describe import GroupDescription, ModelDescription
    from composable_fsdp.diagnostics.meters import Meter, Reading
    from composable_fsdp.diagnostics.timeline import write_timeline

__all__ = [
    "GroupDescription",
    "Meter",
    "ModelDescription",
    "Reading",
    "write_timeline",
]

_ON_FIRST_USE = FirstUse(
    __name__,
    {
        "describe": "GroupDescription ModelDescription",
        "meters": "Meter Reading",
        "timeline": "write_timeline",
    },
)


def __getattr__(name: str) -> Any:
    return _ON_FIRST_USE[name]
