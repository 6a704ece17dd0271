"""Test that ``examples/experts.py`` trains as one process does on the meshes of transformers and of accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from composable_fsdp.checkpoint import load, save
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import assert_exact, full_value
from tests.helpers.torchrun import ROOT


def _example() -> Any:
    spec: Any = importlib.util.spec_from_file_location("example_of_experts", ROOT / "examples" / "experts.py")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()


def transformers(ranks: int, tp: int, ep: int, replicas: int = 1) -> Any:
    """Return slices of the two meshes of ``initialize_distributed_mesh`` of transformers 5.23."""
    sizes = (1, replicas, ranks // replicas // tp, tp), (1, replicas, ranks // replicas // ep, ep)
    names = ("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep")
    dense, experts = (init_device_mesh("cpu", s, mesh_dim_names=n) for s, n in zip(sizes, names, strict=True))
    hybrid = ("dp_replicate",) if replicas > 1 else ()
    return example.Meshes(dense[(*hybrid, "fsdp")], dense["tp"], experts[(*hybrid, "efsdp")], experts["ep"])


def accelerate(ranks: int) -> Any:
    """Return slices of the mesh of ``ParallelismConfig(dp_shard_size=ranks // 2, tp_size=2)`` of accelerate 1.15.

    It has no axis of experts, so the tensor-parallel ranks share them.
    """
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    joined = {name: mesh[("dp_shard",)]._flatten(name) for name in ("dp", "dp_shard_cp", "dp_cp")}
    return example.Meshes(joined["dp_shard_cp"], mesh["tp"], joined["dp_shard_cp"], mesh["tp"])


LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "tp 2, ep 2": (4, lambda: transformers(4, tp=2, ep=2)),
    "ep 2": (4, lambda: transformers(4, tp=1, ep=2)),
    "2 replicas, ep 2": (4, lambda: transformers(4, tp=1, ep=2, replicas=2)),
    "accelerate": (4, lambda: accelerate(4)),
    "data parallel": (4, lambda: example.make_meshes(4, tp=1, ep=1)),
    "one process": (1, lambda: example.make_meshes(1, tp=1, ep=1)),
}
"""The number of ranks and the meshes of each layout."""


def make(layout: str) -> tuple[nn.Module, Optimizer, range]:
    meshes = LAYOUTS[layout][1]()
    model = example.shard(example.build(), meshes)
    each = example.BATCHES // meshes.fsdp.size()
    first = dist.get_rank() // meshes.tp.size() * each
    return model, example.make_optimizer(model), range(first, first + each)


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {name: full_value(p) for name, p in model.named_parameters()}
    momentum = {f"momentum of {n}": optimizer.state[p].get("momentum_buffer") for n, p in model.named_parameters()}
    return found | {name: full_value(value) for name, value in momentum.items() if value is not None}


def step(model: nn.Module, optimizer: Optimizer, number: int, numbers: range) -> dict[str, torch.Tensor]:
    optimizer.zero_grad()
    example.mean_loss(model, number, numbers).backward()
    optimizer.step()
    return {name: full_value(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


def train_beside_one_process(layout: str, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer, numbers = make(layout)
    plain = example.build()
    plain_optimizer = example.make_optimizer(plain)
    for number in range(3):
        found = step(model, optimizer, number, numbers)
        expected = step(plain, plain_optimizer, number, range(example.BATCHES))
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert_near(gradient, expected[name], name)
    save(folder, model, optimizer, {"step": 3})
    if dist.get_world_size() > 1:
        expert: Any = model.get_parameter("0.mixture.experts.up")
        assert expert.to_local().numel() == expert.numel() // (2 if "replicas" in layout else 4)
    return values(model, optimizer)


def load_and_train(layout: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer, numbers = make(layout)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(-7)
    assert load(folder, model, optimizer) == {"step": 3}
    loaded = values(model, optimizer)
    for number in range(3, 5):
        step(model, optimizer, number, numbers)
    return loaded, values(model, optimizer)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    plain = example.build()
    optimizer = example.make_optimizer(plain)
    for number in range(5):
        step(plain, optimizer, number, range(example.BATCHES))
    return values(plain, optimizer)


@pytest.mark.behaviour("A-05", "A-06", "C-02", "C-09", "F-07")
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("tp 2, ep 2", ("one process", "data parallel", "ep 2")),
        ("2 replicas, ep 2", ("one process",)),
        ("accelerate", ("one process", "tp 2, ep 2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_have_the_gradients_of_one_process_and_load_on_other_meshes(
    layout: str, others: tuple[str, ...], tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    saved = run_ranks(train_beside_one_process, LAYOUTS[layout][0], layout, tmp_path)[0]
    for other in others:
        for loaded, trained in run_ranks(load_and_train, LAYOUTS[other][0], other, tmp_path):
            assert loaded.keys() == saved.keys() == expected.keys()
            for name, value in loaded.items():
                assert_exact(value, saved[name], f"{other}, {name}")
                assert_near(trained[name], expected[name], f"{other}, {name}")
