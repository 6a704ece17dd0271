"""accelerate, told to use its FSDP plugin on CPU as it does on accelerators.

``AcceleratorState`` sets ``DistributedType.FSDP`` for the types named ``MULTI_GPU``, ``MULTI_XPU`` and so on, and
silently drops the plugin for ``MULTI_CPU``. This module sets it instead, in the same way for both libraries. Everything
else is unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

__all__ = ["allow_fsdp_on_cpu"]


def allow_fsdp_on_cpu() -> None:
    """Enable the plugin for every ``Accelerator`` that is made later."""
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__
