"""Estimates how much slower a loaded machine is than an idle one."""

from __future__ import annotations

import os


def slack() -> float:
    """Return the number of runnable processes per core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
