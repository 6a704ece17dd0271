"""Code written for torch's FSDP2, unchanged, on this package.

``with patch_torch(): ...`` in a program; around one, ``python -m composable_fsdp.interop script.py``, also below
``torchrun``.
"""

from composable_fsdp.interop._patch import TorchPatch, patch_torch

__all__ = ["TorchPatch", "patch_torch"]
