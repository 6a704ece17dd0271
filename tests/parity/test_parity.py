"""Sharded training equals unsharded training, for all resharding options and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import fsdp as peer

import composable_fsdp
from tests._internals import state_of
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import OPTIMIZERS, Run, assert_equal_runs, play_task, train

COMBINATIONS = (
    *(("mlp", optimizer) for optimizer in OPTIMIZERS),
    ("wide", "sgd"),
    ("transformer", "adam-foreach"),
    ("tied", "sgd"),
)

ONE_OPTIMIZER = (COMBINATIONS[0], *COMBINATIONS[-3:])
"""One optimizer per model: enough on torch's FSDP2, whose gradients are equal, and for further resharding options."""


@lru_cache
def reference(task: str, optimizer: str, rank: int, world_size: int) -> Run:
    """Return the reference run. It is cached for other resharding options, because workers are reused."""
    everyone = range(world_size)
    model = TASKS[task].build()
    return train(model, play_task(task), OPTIMIZERS[optimizer], ranks=everyone, watched=rank, divide=world_size)


def sharded(
    fully_shard: Callable[..., Any], task: str, optimizer: str, reshard_after_forward: bool | int | None
) -> Run:
    rank = dist.get_rank()
    model = shard_layers(TASKS[task].build(), fully_shard, reshard_after_forward=reshard_after_forward)
    return train(model, play_task(task), OPTIMIZERS[optimizer], ranks=[rank], watched=rank)


def check_zero_copy_and_packed_parameters() -> None:
    """Check that the task ``wide`` has zero-copy parameters, even and uneven, and packed parameters."""
    model = shard_layers(TASKS["wide"].build(), composable_fsdp.fully_shard)
    even, uneven = (state_of(model.get_submodule(f"layers.{i}")).group.plan.buckets[0] for i in (0, 1))
    for bucket in (even, uneven):
        assert (bucket.gather.zero_copy, bucket.gather.packed) == ((0,), (1,))
    assert (even.reduce.zero_copy, uneven.reduce.zero_copy) == ((0,), ())


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize(
    ("world_size", "reshard_after_forward"),
    [(2, True), (2, False), (2, None), (4, None), (4, 2)],
)
@on_ranks("world_size")
def test_training_equals_the_unsharded_model_and_on_two_ranks_torch_bitwise(
    reshard_after_forward: bool | int | None,
) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_zero_copy_and_packed_parameters()
    for task, optimizer in COMBINATIONS if reshard_after_forward is None else ONE_OPTIMIZER:
        what = f"{task}, {optimizer}"
        ours = sharded(composable_fsdp.fully_shard, task, optimizer, reshard_after_forward)
        assert_equal_runs(ours, reference(task, optimizer, rank, world_size), what=f"{what}, reference")
        if (task, optimizer) in ONE_OPTIMIZER:
            theirs = sharded(peer.fully_shard, task, optimizer, reshard_after_forward)
            # A sum of two values does not depend on the order. For four values gloo's order depends on the message.
            assert_equal_runs(ours, theirs, what=f"{what}, torch", exact=world_size == 2)
