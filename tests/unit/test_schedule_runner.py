"""Steps in which the runner meets other events or groups than its schedule has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
        assert peak_of(lambda: model(x, order).sum().backward()) <= 2 * LAYER_BYTES, order


def test_a_group_counts_in_the_bound_between_its_modules(mesh: DeviceMesh) -> None:
    model = Chain(6)
    for layer in model.layers[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.layers[0], model.layers[-1]], mesh=mesh)
    fully_shard(model, mesh=mesh).set_max_unsharded_bytes(3 * LAYER_BYTES)
    for _ in range(3):
        assert peak_of(lambda: model(torch.ones(1, WIDTH), range(6)).sum().backward()) <= 3 * LAYER_BYTES
