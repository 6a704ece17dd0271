"""Test that a step of ``Muon`` takes the memory that its docstring names."""

from __future__ import annotations

import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import Muon, fully_shard
from tests._internals import Exchange
from tests.helpers.run_ranks import run_ranks


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known | given:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def measure_memory(shape: tuple[int, int]) -> tuple[float, float]:
    """Return the peaks of what the computation of a matrix takes, in its bytes, and of a step, in those promised."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False) for _ in range(6))))
    for p in model.parameters():
        p.grad = p.detach().clone()
    matrix = 2 * shape[0] * shape[1]  # in bfloat16
    bucket = 8 * matrix
    optimizer = Muon(model.parameters(), bucket_bytes=bucket)
    optimizer.step()
    computed: list[float] = []
    exchange: Any = sys.modules[Exchange.__module__]
    compute = exchange._compute

    def measured(*args: Any) -> None:
        with LiveBytes() as live:
            compute(*args)
        computed.append(live.peak / matrix)

    with mock.patch.object(exchange, "_compute", measured):
        optimizer.step()
    with LiveBytes() as whole:
        optimizer.step()
    loaded = 4 * shape[0] * shape[1] / dist.get_world_size()  # a shard of the momentum, in float32
    return max(computed, default=0.0), whole.peak / (2 * bucket + 5 * matrix + loaded)


@pytest.mark.behaviour("C-03")
def test_a_step_of_muon_takes_two_buckets_and_five_times_a_matrix() -> None:
    for shape, most in (((96, 96), 5.0), ((96, 48), 4.0)):
        for computed, step in run_ranks(measure_memory, 2, shape):
            assert most - 0.1 < computed < most + 0.1
            assert 0.3 < step <= 1
