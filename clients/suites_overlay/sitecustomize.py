"""Runs first in every process of a suite: chooses the library, and records the library that shards modules.

Both libraries make a class for each type of module that they shard, and both kinds of class inherit from torch's
``FSDPModule``. So its ``__init_subclass__`` sees them all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

LIBRARY = os.environ.get("SUITE_LIBRARY")


def note_use() -> None:
    """Write a file ``used-LIBRARY`` for each library that shards a module from now on."""
    from torch.distributed.fsdp import FSDPModule

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        ours = any(base.__module__.startswith("composable_fsdp.") for base in cls.__mro__)
        Path(os.environ["SUITE_OUT"], "used-ours" if ours else "used-fsdp2").touch()

    FSDPModule.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment, method-assign]


if LIBRARY and "resource_tracker" not in " ".join(sys.orig_argv):
    if LIBRARY == "ours":
        from composable_fsdp.interop import patch_torch

        patch_torch()
    note_use()
