"""State dicts of sharded models and optimizers, and checkpoints on disk."""

from composable_fsdp.checkpoint.folder import latest
from composable_fsdp.checkpoint.pending import PendingSave
from composable_fsdp.checkpoint.store import load, save

__all__ = ["PendingSave", "latest", "load", "save"]
