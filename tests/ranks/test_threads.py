"""Test threads of one process that train their own models."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import MixedPrecisionPolicy, fully_shard, local_optimizer
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import ConfigurationError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import single_rank, values_of
from tests.helpers.threads import run_in_threads
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment

THREADS = 8
MODELS = 2
"""The number of models that each thread builds one after the other."""
WIDTH = 6


@pytest.fixture
def alone() -> Iterator[None]:
    with single_rank():
        yield


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def build(seed: int, mesh: DeviceMesh, **options: Any) -> Any:
    """Build a model with values from its own generator, because all threads share the default generator."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model(batch(seed)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"SGD was built before fully_shard: 6 of its 6 parameters"):
        stale.step()
    model.zero_grad()
    return model


def train(model: Any, seed: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = local_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(steps):
        with torch.no_grad():
            model(batch(seed - step))
        model(batch(seed + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def use_models(seed: int, mesh: DeviceMesh, folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(MODELS):
        model = build(seed + number, mesh, reshard_after_forward=number == 0)
        optimizer = train(model, seed)
        copied = copy.deepcopy(model)
        train(copied, seed + 7)
        found += [values_of(model), values_of(copied)]
        if number == 0:
            save(folder, model, optimizer)
            train(model, seed + 9)
            load(folder, model, optimizer)
            found.append(values_of(model))
    return found


def assert_exact(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.behaviour("J-04", "H-06")
def test_eight_threads_train_the_same_models_as_one(alone: None, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    expected = [use_models(100 * i, mesh, tmp_path / f"one-{i}") for i in range(THREADS)]
    calls = [partial(use_models, 100 * i, mesh, tmp_path / f"of-several-{i}") for i in range(THREADS)]
    assert_exact(run_in_threads(calls, 1e-5), expected)


def train_in_threads(numbers: list[int]) -> None:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in numbers]

    def run(i: int) -> dict[str, torch.Tensor]:
        """Train one model. The second thread's unsharded parameters must not depend on the first thread's steps."""
        precision = MixedPrecisionPolicy(torch.bfloat16 if i else None)
        model = build(i, meshes[i], mp_policy=precision, reshard_after_forward=not i)
        model.set_reshard_after_backward(not i)
        train(model, 10 * i + dist.get_rank(), steps=6)
        return values_of(model)

    found = run_in_threads([partial(run, i) for i in numbers], 1e-4)
    assert_exact(found, [run(i) for i in numbers])


@pytest.mark.behaviour("J-04", "H-06")
@pytest.mark.parametrize("transport", [IN_COMMON, SOCKETS], ids=["in common", "sockets"])
def test_two_threads_of_each_rank_train_over_process_groups_of_their_own(transport: Environment) -> None:
    run_ranks(train_in_threads, 2, [0, 1], environment=transport)


@pytest.mark.behaviour("J-04", "H-06")
@on_ranks(2, environment=SOCKETS, timeout=30)
def test_threads_connect_their_groups_in_another_order_than_on_the_other_rank() -> None:
    """Connect two groups in threads, on rank 1 in the reverse order, so that each rank first waits for the other."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    first = dist.get_rank()

    def connect(i: int) -> None:
        if i != first:
            time.sleep(0.5)
        fully_shard(nn.Linear(WIDTH, WIDTH), mesh=meshes[i])

    run_in_threads([partial(connect, i) for i in range(2)], 1e-3)
