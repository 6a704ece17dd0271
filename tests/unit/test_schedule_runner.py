"""Steps in which the runner meets other events or groups than its schedule has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder

RANKS, WIDTH = 4, 512
LAYER_BYTES = WIDTH * WIDTH * 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes of unsharded parameters in ``step``."""
    held = peak = 0
    with Recorder() as recorder:
        step()
    for event in recorder:
        if event.operation in (Operation.ALLOCATE, Operation.FREE):
            held += event.bytes if event.operation is Operation.ALLOCATE else -event.bytes
            peak = max(peak, held)
    return peak


def train(model: nn.Module, *inputs: object) -> None:
    model(*inputs).sum().backward()


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(count))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


@pytest.mark.filterwarnings("ignore:Forward order differs")
def test_a_changed_order_keeps_the_bound_on_unsharded_bytes(mesh: DeviceMesh) -> None:
    model = Chain(6)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).set_max_unsharded_bytes(2 * LAYER_BYTES)
    x = torch.ones(1, WIDTH)
    for order in (range(6), range(6), (0, 2, 4, 5), (1, 3, 0, 5, 2), (5, 0, 2), range(6)):
        assert peak_of(partial(train, model, x, order)) <= 2 * LAYER_BYTES, order


def test_a_group_counts_in_the_bound_between_its_modules(mesh: DeviceMesh) -> None:
    model = Chain(6)
    for layer in model.layers[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.layers[0], model.layers[-1]], mesh=mesh)
    fully_shard(model, mesh=mesh).set_max_unsharded_bytes(3 * LAYER_BYTES)
    for _ in range(3):
        assert peak_of(partial(train, model, torch.ones(1, WIDTH), range(6))) <= 3 * LAYER_BYTES


class Flaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, fails: bool) -> torch.Tensor:
        if fails:
            raise ArithmeticError
        out: torch.Tensor = self.layer(x)
        return out


class Retrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flaky, self.last = Flaky(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.flaky(x, fails=True)
        except ArithmeticError:
            x = self.flaky(x, fails=False)
        out: torch.Tensor = self.last(x)
        return out


def test_a_module_that_runs_again_after_an_error_is_freed(mesh: DeviceMesh) -> None:
    model = Retrying()
    fully_shard(model.flaky, mesh=mesh)
    fully_shard(model.last, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad(), Recorder() as recorder:
        model(x)
    in_memory = [
        e.operation for e in recorder if e.group == "flaky" and e.operation in (Operation.WAIT, Operation.RESHARD)
    ]
    assert in_memory[-1] is Operation.RESHARD, "an optimizer's step would not reach what stays"
