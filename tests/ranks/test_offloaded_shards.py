"""Optimizer state that rests in host memory, over sharded parameters of several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.checkpoint import load, save
from tests._internals import local_part
from tests.helpers.host_as_device import host_as_device, offload
from tests.helpers.models import UnevenMLP
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value
from tests.helpers.transports import SOCKETS
from tests.simulation import BACKEND, simulated_accelerator

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
}
BUCKET = 150


def build(shape: tuple[int, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    model = UnevenMLP()
    mesh = init_device_mesh("cpu", shape) if shape else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {name: full_value(p).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = full_value(value).clone()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_exact(found[name], value, name)


@host_as_device()
def compare(shape: tuple[int, ...]) -> None:
    for make in OPTIMIZERS.values():
        expected, model = build(shape), build(shape)
        plain, optimizer = make(expected), offload(make(model), bucket_bytes=BUCKET)
        for step in range(4):
            train(expected, plain, range(step, step + 1))
            train(model, optimizer, range(step, step + 1))
            assert_same(values(model, optimizer), values(expected, plain))


@pytest.mark.behaviour("C-01", "C-02", "D-02")
@pytest.mark.parametrize(("ranks", "shape"), [(2, (2,)), (4, (2, 2))])
def test_offloaded_state_gives_the_bits_of_the_plain_step(ranks: int, shape: tuple[int, ...]) -> None:
    run_ranks(compare, ranks, shape)


class Lamb(Optimizer):
    """Scales each update by norms, of which all are computed first, one all-reduce for each."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [p for group in self.param_groups for p in group["params"]]
        for p in found:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 0.1)
        updates = [self.state[p]["mean"] for p in found]
        norms, of_updates = ([full_value(t.norm()).item() for t in tensors] for tensors in (found, updates))
        for p, update, norm, of_update in zip(found, updates, norms, of_updates, strict=True):
            p.sub_(update, alpha=0.1 * norm / of_update)


@host_as_device()
def step_uneven() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3, bias=False) for _ in range(5)]
    expected, model = (fully_shard(nn.Sequential(*copy.deepcopy(layers))) for _ in range(2))
    plain, offloaded = Lamb(expected.parameters(), {}), offload(Lamb(model.parameters(), {}), bucket_bytes=100)
    for each, optimizer in ((expected, plain), (model, offloaded)):
        for _ in range(3):
            for p in each.parameters():
                p.grad = p.detach().square()
            optimizer.step()
    assert_same(values(model, offloaded), values(expected, plain))


@pytest.mark.behaviour("C-01", "C-02")
def test_ranks_with_uneven_shards_cut_buckets_alike() -> None:
    """Otherwise the collectives of an update are those of other parameters on another rank."""
    run_ranks(step_uneven, 2)


@host_as_device()
def train_and_save(folder: Path) -> None:
    model = build()
    optimizer = offload(OPTIMIZERS["adamw-fused"](model), bucket_bytes=BUCKET)
    train(model, optimizer, range(2))
    pending = save(folder, model, optimizer, step=2, asynchronous=True)
    train(model, optimizer, range(2, 4))  # while it is being written
    pending.wait()


def train_plainly() -> dict[str, torch.Tensor]:
    model = build()
    optimizer = OPTIMIZERS["adamw-fused"](model)
    train(model, optimizer, range(2))
    return values(model, optimizer)


@host_as_device()
def resume(folder: Path, *, is_offloaded: bool) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = OPTIMIZERS["adamw-fused"](model)
    if is_offloaded:
        offload(optimizer, bucket_bytes=BUCKET)
    load(folder, model, optimizer)
    return values(model, optimizer)


@pytest.mark.behaviour("F-07")
def test_checkpoints_resume_on_other_numbers_of_ranks_with_and_without_offload(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, tmp_path)
    expected = run_ranks(train_plainly, 2)[0]
    for ranks in (1, 4):
        for is_offloaded in (False, True):
            assert_same(run_ranks(resume, ranks, tmp_path, is_offloaded=is_offloaded)[0], expected)


def shards(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = local_part(p).detach().clone()
        for key, value in optimizer.state[p].items():
            found[f"{name}.{key}"] = local_part(value).clone()
    return found


@pytest.mark.behaviour("M-01", "D-02")
@on_ranks(2, environment=SOCKETS, timeout=120)
def test_copies_have_no_races_on_a_device() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    models = []
    with simulated_accelerator() as device, host_as_device():
        for is_offloaded in (False, True):
            torch.manual_seed(0)
            model = fully_shard(UnevenMLP(), mesh=mesh)
            optimizer = OPTIMIZERS["adamw-fused"](model)
            if is_offloaded:
                offload(optimizer, bucket_bytes=BUCKET)
            train(model, optimizer, range(4))
            models.append((model, optimizer))
        device.synchronize()
        found = [shards(model, optimizer) for model, optimizer in models]
        assert_same(found[1], found[0])
    assert not device.races, "\n".join(map(str, device.races))
