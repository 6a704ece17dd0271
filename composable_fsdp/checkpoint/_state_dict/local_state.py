"""State of optimizers that work on local tensors: plain tensors that are this rank's shards."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp.checkpoint._state_dict.rekey import OptimizerParam

__all__ = ["has_shards_shape", "is_plain"]


def is_plain(value: object, member: OptimizerParam) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a plain tensor but its parameter a DTensor: a local shard, or a replicated value."""
    return isinstance(member.parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def has_shards_shape(value: object, member: OptimizerParam) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` may be a local shard. It is one if this holds on every rank that has it."""
    return is_plain(value, member) and value.ndim > 0 and value.shape == local_part(member.parameter).shape
