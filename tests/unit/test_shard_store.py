"""Casts and copies of shards to the compute dtype and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests._internals import cast_and_move

CPU = torch.device("cpu")
META = torch.device("meta")


class Operators(TorchDispatchMode):
    """Records the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_payload_is_the_shard_if_dtype_and_device_match(dtype: torch.dtype) -> None:
    shard = torch.arange(8).to(dtype)
    with Operators() as ran:
        assert cast_and_move(shard, dtype, CPU) is shard
    assert ran.names == []


def test_another_dtype_takes_one_kernel_into_new_memory_and_leaves_the_shard() -> None:
    shard = torch.tensor([0.1, -2.5, 3e38])
    before = shard.clone()
    with Operators() as ran:
        payload = cast_and_move(shard, torch.bfloat16, CPU)
    assert ran.names == ["_to_copy"]
    assert payload.dtype == torch.bfloat16
    assert torch.equal(payload, before.to(torch.bfloat16))
    assert payload.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr()
    assert torch.equal(shard, before)


def test_another_device_takes_one_copy() -> None:
    shard = torch.zeros(4)
    with Operators() as ran:
        payload = cast_and_move(shard, torch.float32, META)
    assert ran.names == ["_to_copy"]
    assert payload.device == META


def test_another_device_and_dtype_take_one_copy_and_then_one_cast() -> None:
    shard = torch.zeros(4)
    with Operators() as ran:
        payload = cast_and_move(shard, torch.bfloat16, META)
    assert ran.names == ["_to_copy", "_to_copy"]
    assert (payload.device, payload.dtype) == (META, torch.bfloat16)
