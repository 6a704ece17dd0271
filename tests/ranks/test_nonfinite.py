"""Test the search for non-finite gradients: all ranks report the same parameters and ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import clip_grad_norm_, find_nonfinite, fully_shard
from composable_fsdp.errors import GradientError
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks


def local_gradient(model: Any, name: str) -> torch.Tensor:
    gradient = model.get_parameter(name).grad
    return gradient.to_local()


def spoil(model: nn.Module, faults: dict[str, tuple[int, ...]], value: float) -> None:
    for name, ranks in faults.items():
        if dist.get_rank() in ranks:
            local_gradient(model, name).view(-1)[-1] = value


def build(**options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_parameter("spare", nn.Parameter(torch.ones(8)))  # gets no gradient
    model[1].register_parameter("frozen", nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


@pytest.mark.behaviour("H-04", "H-05")
@on_ranks(2)
def test_parameters_and_ranks_are_named_on_all_ranks() -> None:
    model = build()
    model(torch.ones(2, 8)).sum().backward()
    with counted_collectives() as counts:
        assert find_nonfinite(model) == {}
    assert counts == {"all_gather": 1}
    spoil(model, {"0.weight": (1,), "1.bias": (0, 1)}, nan)
    spoil(model, {"0.bias": (0,)}, -inf)
    found = find_nonfinite(model)
    assert found == {"0.weight": (1,), "0.bias": (0,), "1.bias": (0, 1)}
    assert list(found) == ["0.weight", "0.bias", "1.bias"]
    assert find_nonfinite(model, values=True) == {}
    with pytest.raises(GradientError, match=r"find_nonfinite\(model\), called on all ranks, names the parameters"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with torch.no_grad():
        model.get_parameter("1.spare").fill_(nan)
    assert find_nonfinite(model, values=True) == {"1.spare": (0, 1)}


@pytest.mark.behaviour("H-04", "H-05")
@on_ranks(2)
def test_a_batch_that_is_nan_on_one_rank_shows_everywhere() -> None:
    model = build()
    model(torch.full((2, 8), nan if dist.get_rank() == 1 else 1.0)).sum().backward()
    assert set(find_nonfinite(model)) == {"0.weight", "1.weight"}


def search_on_a_hybrid_mesh() -> None:
    model = build(mesh=init_device_mesh("cpu", (2, 2)))
    model(torch.ones(2, 8)).sum().backward()
    assert find_nonfinite(model) == {}
    spoil(model, {"0.weight": (3,), "1.bias": (0, 1)}, inf)
    assert find_nonfinite(model) == {"0.weight": (3,), "1.bias": (0, 1)}


def search_on_a_tensor_parallel_mesh() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model = PAIRS.build()
    parallelize_pairs(model, mesh["tp"])
    shard_layers(model, fully_shard, mesh=mesh["dp"])
    generator = torch.Generator().manual_seed(0)
    inputs, _ = PAIRS.batch(generator)
    model(inputs).sum().backward()
    assert find_nonfinite(model) == {}
    spoil(model, {"layers.0.up.weight": (2,), "layers.0.down.weight": (1, 3)}, nan)
    assert find_nonfinite(model) == {"layers.0.up.weight": (2,), "layers.0.down.weight": (1, 3)}


@pytest.mark.behaviour("H-04")
@pytest.mark.parametrize(
    "layout", [search_on_a_hybrid_mesh, search_on_a_tensor_parallel_mesh], ids=lambda layout: layout.__name__
)
def test_ranks_of_a_mesh_of_two_axes_are_distinguished(layout: Callable[[], None]) -> None:
    run_ranks(layout, 4)


def test_a_model_that_is_not_sharded_is_searched_too() -> None:
    model = nn.Linear(2, 2)
    model(torch.full((1, 2), nan)).sum().backward()
    assert find_nonfinite(model) == {"weight": (0,)}
