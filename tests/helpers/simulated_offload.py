"""CPU offload on the simulated accelerator, whose tensors have the device of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from composable_fsdp import CPUOffloadPolicy
from tests._internals import BucketReducer, core_gather, core_group, memory

OTHER = torch.device("cpu:0")
"""A device that is not equal to that of any tensor, so that code that compares devices copies to it."""


def _rest_device(offload: object, device: torch.device) -> torch.device:
    return OTHER if isinstance(offload, CPUOffloadPolicy) else device


def _cast_and_move(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return memory.cast_and_move(shard, dtype, OTHER if shard.is_pinned() else device)


def _finish(self: BucketReducer, *args: Any) -> Any:
    if self.pin_memory:
        self.rest = OTHER
    return _finish_on_device(self, *args)


_finish_on_device = BucketReducer.finish


@contextmanager
def simulated_offload() -> Iterator[None]:
    """Have ``CPUOffloadPolicy`` keep shards in pinned memory, and copy shards and gradients, on a CPU mesh."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(core_group, "rest_device", _rest_device))
        stack.enter_context(mock.patch.object(core_gather, "cast_and_move", _cast_and_move))
        stack.enter_context(mock.patch.object(core_gather.Bucket, "cached_part", None))  # for shards on the device only
        stack.enter_context(mock.patch.object(BucketReducer, "finish", _finish))
        yield
