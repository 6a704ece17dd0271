"""The factor by which a loaded machine is slower than an idle one."""

from __future__ import annotations

import os

__all__ = ["slack"]


def slack() -> float:
    """A factor: as many processes want to run now as there are cores, or that many times as many."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
