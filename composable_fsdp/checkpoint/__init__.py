"""State dicts of sharded models and optimizers, and checkpoints on disk."""

from __future__ import annotations

from composable_fsdp.checkpoint._coordination.pending_save import PendingSave
from composable_fsdp.checkpoint._dcp.manifest import latest
from composable_fsdp.checkpoint._dcp.save_and_load import load, save
from composable_fsdp.checkpoint._safetensors.load_safetensors import load_safetensors
from composable_fsdp.checkpoint._safetensors.save_safetensors import save_safetensors
from composable_fsdp.checkpoint._state_dict.model import load_state_dict, state_dict, state_dict_form
from composable_fsdp.checkpoint._state_dict.optimizer_load import load_optimizer_state_dict
from composable_fsdp.checkpoint._state_dict.optimizer_save import optimizer_state_dict
from composable_fsdp.checkpoint._state_dict.options import Full, Local, Sharded
from composable_fsdp.checkpoint._state_dict.rekey import rekey_optimizer, rekey_optimizer_state_dict

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
