"""State dicts of sharded models and optimizers, and checkpoints on disk."""

from __future__ import annotations

from composable_fsdp.checkpoint.safetensors import load_safetensors
from composable_fsdp.checkpoint.safetensors_save import save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
