"""State of optimizers that work on local tensors: plain tensors that are a rank's shard of something larger."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp.checkpoint._state_dict.rekey import Member

__all__ = ["has_shards_shape", "is_plain"]


def is_plain(value: object, member: Member) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a plain tensor though its parameter is distributed: a shard, or the same on every rank."""
    return isinstance(member.parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def has_shards_shape(value: object, member: Member) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` may be a shard: it is one if this holds on every rank that has it."""
    return is_plain(value, member) and value.ndim > 0 and value.shape == local_part(member.parameter).shape
