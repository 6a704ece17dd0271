"""Support for running code written for torch's FSDP2 on this package, unchanged.

Use ``with patch_torch(): ...`` in a program, or run it with ``python -m composable_fsdp.interop script.py``, also under
``torchrun``.
"""

from composable_fsdp.interop._patch import TorchPatch, patch_torch

__all__ = ["TorchPatch", "patch_torch"]
