"""Gradient clipping, optimizers on local shards, and optimizers of whole matrices."""

from composable_fsdp.optim.clip_grad import clip_grad_norm_, get_total_norm
from composable_fsdp.optim.local_optimizer import local_optimizer, set_local_steps
from composable_fsdp.optim.muon import Muon
from composable_fsdp.optim.offload_optimizer import offload_optimizer
from composable_fsdp.optim.owner_step import owner_step

__all__ = [
    "Muon",
    "clip_grad_norm_",
    "get_total_norm",
    "local_optimizer",
    "offload_optimizer",
    "owner_step",
    "set_local_steps",
]
