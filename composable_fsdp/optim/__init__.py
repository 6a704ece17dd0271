"""Gradient clipping and optimizers on local shards."""

from composable_fsdp.optim.clip_grad import clip_grad_norm_, get_total_norm
from composable_fsdp.optim.local_optimizer import local_optimizer

__all__ = ["clip_grad_norm_", "get_total_norm", "local_optimizer"]
