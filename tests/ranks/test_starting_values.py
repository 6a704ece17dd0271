"""Test that ranks whose shards come from different models raise an error in the first forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp import DivergenceError, FSDPModule, fully_shard, initialize, sharded_rng
from composable_fsdp.errors import ParameterError
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.model_parallel import Pairs, parallelize_pairs
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import COPIES


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def forward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def refusal(model: nn.Module, kind: type[Exception]) -> str:
    texts = []
    for _ in range(2):  # the error is raised until the values are corrected
        with pytest.raises(kind) as error:
            forward(model)
        texts.append(str(error.value))
    assert len(set(texts)) == 1
    return texts[0]


def load_from_first(model: nn.Sequential) -> None:
    """Load rank 0's values. The first rank's shards, and empty ones, do not change."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, build(0).state_dict() if dist.get_rank() == 0 else {}, options=options)


def load_other(model: nn.Sequential) -> None:
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), build(7).parameters(), strict=True):
            sharded = cast(DTensor, ours)
            sharded.data.copy_(distribute_like(theirs, sharded))


def distribute_like(value: torch.Tensor, sharded: DTensor) -> DTensor:
    return distribute_tensor(value.detach(), sharded.device_mesh, sharded.placements)


def assign(model: nn.Sequential) -> None:
    values = {
        name: distribute_like(value, cast(DTensor, model.get_parameter(name)))
        for name, value in build(7).state_dict().items()
    }
    model.load_state_dict(values, assign=True)


def initialize_by_seed(model: nn.Sequential) -> None:
    initialize(model, seed=3)


@pytest.mark.behaviour("J-01", "H-02")
@on_ranks(2)
def test_different_starting_values_are_an_error_unless_overwritten() -> None:
    rank = dist.get_rank()
    texts = [refusal(shard(build(rank)), DivergenceError)]
    for overwrite in (load_from_first, load_other, assign, initialize_by_seed):
        model = shard(build(rank))
        overwrite(model)
        forward(model)
    forward(shard(build(rank), sync_module_states=True))
    partly = shard(build(rank))
    nn.init.ones_(partly.get_parameter("0.weight").data)
    texts.append(refusal(partly, DivergenceError))
    load_from_first(partly)
    forward(partly)
    trusted = cast(FSDPModule, shard(build(rank)))
    trusted.set_order_check("off")
    forward(cast(nn.Module, trusted))
    everything, rest = texts
    assert everything == (
        "Ranks have started from different values: parameter '1.weight' of group 'root' was not the same on rank 0 and "
        "on rank 1 when fully_shard cut it, and so 3 other parameters, so the shards do not belong to one model. Pass "
        "sync_module_states=True to fully_shard; or call torch.manual_seed with the same seed on every rank before "
        "the model is built; or composable_fsdp.initialize(model, seed=...), or load a checkpoint, before the first "
        "forward."
    )
    assert "parameter '1.weight' of group 'root' was not" in rest
    assert "and so 2 other parameters" in rest


@pytest.mark.behaviour("J-01", "A-06")
@on_ranks(4)
def test_initial_values_are_compared_on_data_parallel_axes_only() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for replica_starts_apart in (False, True):
        torch.manual_seed(mesh.get_local_rank("dp") if replica_starts_apart else 0)
        model = Pairs()
        parallelize_pairs(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        if replica_starts_apart:  # ranks with the same tensor-parallel rank differ
            with pytest.raises(DivergenceError, match=r"'layers\.0\.up\.weight' of group 'root' was not the same on"):
                model(torch.ones(2, 5))
        else:
            model(torch.ones(2, 5))


def build_on_meta(**options: Any) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model = shard(model, **options)
    model.to_empty(device="cpu")
    return model


def reset(model: nn.Module) -> None:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def fill(model: nn.Module, values: Callable[[DTensor], torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            cast(DTensor, parameter).to_local().copy_(values(cast(DTensor, parameter)))


def equal_rows(parameter: DTensor) -> torch.Tensor:
    row = torch.randn(parameter.shape[1:], generator=torch.Generator().manual_seed(0))
    return row.expand(parameter.to_local().shape)


def repeat_one_table(parameter: DTensor) -> torch.Tensor:
    """Return the same shard on all ranks for one parameter, like position embeddings extended by copies."""
    repeats = parameter.shape == (16, 8)
    generator = torch.Generator().manual_seed(0 if repeats else dist.get_rank())
    return torch.randn(parameter.to_local().shape, generator=generator)


HARMLESS: tuple[Callable[[DTensor], torch.Tensor], ...] = (
    lambda _: torch.zeros(()),
    lambda _: torch.ones(()),
    equal_rows,
    repeat_one_table,
)


@pytest.mark.behaviour("J-01")
@on_ranks(2, environment=COPIES)
def test_equal_random_shards_are_an_error_and_other_equal_ones_are_not() -> None:
    model, trusted = build_on_meta(), build_on_meta()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        reset(model)
        reset(trusted)
    texts = [refusal(model, ParameterError)]
    trusted.set_order_check("off")  # type: ignore[operator]
    forward(trusted)
    with sharded_rng(model, 0):
        reset(model)
    forward(model)
    model = build_on_meta()
    initialize(model, seed=0)
    with counted_collectives() as counts:
        forward(model)
    assert counts["comparison"] == 1
    for values in HARMLESS:
        model = build_on_meta()
        fill(model, values)
        forward(model)
    assert texts == [
        "parameter '1.weight' of group 'root' has the same random values on ranks 0-1, which hold different shards of "
        "it, and so 2 other parameters. A random operation, such as reset_parameters(), has run on the shards with the "
        "same seed on every rank. Call composable_fsdp.initialize(model, seed=...) in its place, or enclose it in "
        "composable_fsdp.sharded_rng(model, seed). If the values are meant to repeat, call set_order_check('off') on "
        "the root, or set COMPOSABLE_FSDP_ORDER_CHECK=off."
    ]


@pytest.mark.behaviour("J-01")
@on_ranks(4)
def test_replicas_may_hold_the_same_values() -> None:
    model = build_on_meta(mesh=init_device_mesh("cpu", (2, 2)))
    initialize(model, seed=0)
    forward(model)
    model = shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh=init_device_mesh("cpu", (4, 1)))
    forward(model)
