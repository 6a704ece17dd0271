"""State dicts of sharded models and optimizers, and checkpoints on disk."""

from __future__ import annotations

from composable_fsdp.checkpoint._coordination import PendingSave
from composable_fsdp.checkpoint._dcp.directory import latest
from composable_fsdp.checkpoint._dcp.load import load
from composable_fsdp.checkpoint._dcp.save import save
from composable_fsdp.checkpoint._safetensors import load_safetensors, save_safetensors
from composable_fsdp.checkpoint._state_dict.model import (
    Full,
    Local,
    Sharded,
    load_state_dict,
    state_dict,
    state_dict_form,
)
from composable_fsdp.checkpoint._state_dict.optimizer import load_optimizer_state_dict, optimizer_state_dict

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
    "save",
    "save_safetensors",
    "state_dict",
    "state_dict_form",
]
