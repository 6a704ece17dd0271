"""Support for running code written for torch's FSDP2 on this package, unchanged.

Use ``with patch_torch(): ...`` in a program, or run it with ``composable-fsdp run script.py``, or under ``torchrun``
with ``-m composable_fsdp run script.py``.
"""

from composable_fsdp.interop._patch import TorchPatch, patch_torch

__all__ = ["TorchPatch", "patch_torch"]
