"""Reference counting frees a model without references, without the garbage collector."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from tests.helpers.dropped_models import CASES, remaining_objects
from tests.helpers.fresh_process import run_program

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("name", CASES)
def test_a_dropped_model_is_freed_without_the_garbage_collector(name: str) -> None:
    assert remaining_objects(CASES[name]) == []


class Note:
    """A non-tensor argument."""


class Known(Exception):
    """An exception that supports weak references."""


class Shift(nn.Module):
    """Adds a weight to its input, so that autograd saves no tensors. Keeps weak references to its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, note: Note, given: list[ref[Any]]) -> torch.Tensor:
        given += [ref(x), ref(note)]
        return x + self.weight


class TwoShifts(nn.Module):
    """Calls two modules, each with its own note."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shift(), Shift()

    def forward(self, x: torch.Tensor, given: list[ref[Any]]) -> torch.Tensor:
        return self.second(self.first(x, Note(), given), Note(), given)


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("as_one_group", [False, True])
def test_the_graph_keeps_no_arguments_and_no_exception_of_the_calls(as_one_group: bool) -> None:
    model, given = TwoShifts(), list[ref[Any]]()
    for modules in [[model.first, model.second]] if as_one_group else [[model.first], [model.second]]:
        fully_shard(modules)
    fully_shard(model)
    gc.disable()
    try:
        try:
            raise Known
        except Known as error:
            given.append(ref(error))
            output = model(torch.ones(4, 8, requires_grad=True), given)
        assert [alive for known in given if (alive := known()) is not None] == []
    finally:
        gc.enable()
    assert len(given) == 5
    output.sum().backward()


AGAIN = """
import gc, os
import torch
import torch.distributed as dist
from torch import nn
from composable_fsdp import ShardingStrategy, fully_shard

def train(options):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 4)
    fully_shard(model, **options)
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()

for options in ({}, {"strategy": ShardingStrategy.HYBRID_SHARD}):
    for _ in range(4):
        train(options)
        gc.collect()
        print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.multiprocess
def test_process_groups_of_earlier_rounds_are_freed() -> None:
    done = run_program(AGAIN)
    assert done.returncode == 0, done.stderr
    threads = list(map(int, done.stdout.split()))
    assert threads[1:4] == [threads[1]] * 3
    assert threads[5:] == [threads[5]] * 3


SHARD_AXIS = """
import gc, weakref
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from composable_fsdp import fully_shard
from tests._internals import data_parallel_axes, shard_mesh_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
axes = data_parallel_axes(init_device_mesh("cpu", (1, 1)))
assert shard_mesh_of(axes) is shard_mesh_of(axes)
mesh = weakref.ref(shard_mesh_of(axes))
del axes
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(nn.Linear(4, 4))
gc.collect()
print(mesh())
"""


@pytest.mark.multiprocess
def test_the_mesh_of_a_shard_axis_is_one_object_until_the_process_group_is_another() -> None:
    done = run_program(SHARD_AXIS)
    assert done.stdout == "None\n", done.stderr
