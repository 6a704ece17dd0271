"""Loads torch's forward mode of autograd."""

from __future__ import annotations

import warnings
from importlib import import_module


def load_forward_mode() -> None:
    """Load what torch loads for the first dual number, which warns that ``torch.jit.script`` is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # a FutureWarning from torch 2.15 on
        import_module("torch._decomp.decompositions_for_jvp")
