"""State dicts of sharded models and optimizers, and checkpoints on disk."""

from __future__ import annotations

from composable_fsdp.checkpoint.forms import load_state_dict, state_dict, state_dict_form
from composable_fsdp.checkpoint.intact import latest
from composable_fsdp.checkpoint.optimizer_in import load_optimizer_state_dict
from composable_fsdp.checkpoint.optimizer_out import optimizer_state_dict
from composable_fsdp.checkpoint.options import Full, Local, Sharded
from composable_fsdp.checkpoint.pending import PendingSave
from composable_fsdp.checkpoint.rekey import rekey_optimizer, rekey_optimizer_state_dict
from composable_fsdp.checkpoint.safetensors_load import load_safetensors
from composable_fsdp.checkpoint.safetensors_save import save_safetensors
from composable_fsdp.checkpoint.store import load, save

__all__ = [
    "Full",
    "Local",
    "PendingSave",
    "Sharded",
    "latest",
    "load",
    "load_optimizer_state_dict",
    "load_safetensors",
    "load_state_dict",
    "optimizer_state_dict",
    "rekey_optimizer",
    "rekey_optimizer_state_dict",
    "save",
    "save_safetensors",
    "state_dict",
    "state_dict_form",
]
