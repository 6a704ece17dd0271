"""The mesh, the resharding and the errors of strategies by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import DataParallelMeshDims, ShardingStrategy
from composable_fsdp.errors import ConfigurationError, MeshError
from tests._internals import StrategyName, as_strategy, default_mesh, resolve_strategy
from tests.helpers.sharding import fake_ranks

pytestmark = pytest.mark.behaviour("B-02")

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with fake_ranks(8):
        yield


def test_types_of_words_have_the_known_words() -> None:
    assert get_args(StrategyName) == tuple(each.name for each in ShardingStrategy)


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_names_enums_and_torchs_enums_are_the_same(strategy: ShardingStrategy) -> None:
    torchs = next(each for each in TorchShardingStrategy if each.name.lstrip("_") == strategy.name)
    for given in (strategy, strategy.name, strategy.name.lower(), f"_{strategy.name}", torchs, torchs.name):
        assert as_strategy(given) is strategy


@pytest.mark.parametrize("given", ["FULL", 3, None])
def test_the_error_for_an_unknown_strategy_lists_all(given: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        as_strategy(given)
    assert str(caught.value) == (
        f"strategy must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, not {given!r}."
    )


@pytest.mark.parametrize(
    ("strategy", "shape", "reshard"),
    [
        ("FULL_SHARD", (8,), None),
        ("SHARD_GRAD_OP", (8,), False),
        ("NO_SHARD", (8, 1), False),
        ("HYBRID_SHARD", (4, 2), None),
        ("HYBRID_SHARD_ZERO2", (4, 2), False),
    ],
)
def test_the_default_mesh_is_made_once(strategy: str, shape, reshard: bool | None, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    mesh, reshard_after_forward = resolve_strategy(ShardingStrategy[strategy], None, None, None)
    assert tuple(mesh.shape) == shape
    assert reshard_after_forward is reshard
    assert resolve_strategy(ShardingStrategy[strategy], None, None, None)[0] is mesh


@pytest.mark.behaviour("A-16")
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_any_mesh_of_one_rank_serves_every_strategy(strategy: ShardingStrategy) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for mesh in (None, default_mesh(), init_device_mesh("cpu", (1, 1))):
        assert resolve_strategy(strategy, mesh, None, None)[0].size() == 1


@pytest.mark.parametrize(
    ("strategy", "shape", "message"),
    [
        (
            "FULL_SHARD",
            (2, 4),
            "strategy=FULL_SHARD shards over all ranks, but the mesh given replicates over 2 and shards over 4 ranks. "
            "Make one with init_device_mesh('cpu', (8,), mesh_dim_names=('shard',)).",
        ),
        (
            "NO_SHARD",
            (8,),
            "strategy=NO_SHARD replicates over all ranks, but the mesh given replicates over 1 and shards over 8 "
            "ranks. Make one with init_device_mesh('cpu', (8, 1), mesh_dim_names=('replicate', 'shard')).",
        ),
        (
            "HYBRID_SHARD_ZERO2",
            (8,),
            "strategy=HYBRID_SHARD_ZERO2 needs a 2-d mesh, (replicate, shard), but the mesh given replicates over 1 "
            "and shards over 8 ranks. Make one with init_device_mesh('cpu', (hosts, 8 // hosts), "
            "mesh_dim_names=('replicate', 'shard')).",
        ),
    ],
)
def test_an_unsuitable_mesh_is_refused(strategy: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        resolve_strategy(ShardingStrategy[strategy], init_device_mesh("cpu", shape), None, None)
    assert str(caught.value) == message


def test_suitable_meshes_are_used_unchanged() -> None:
    flat, replicas, both = (init_device_mesh("cpu", shape) for shape in ((8,), (8, 1), (2, 4)))
    assert resolve_strategy(ShardingStrategy.SHARD_GRAD_OP, flat, None, None)[0] is flat
    assert resolve_strategy(ShardingStrategy.NO_SHARD, replicas, None, None)[0] is replicas
    for strategy in HYBRID:
        assert resolve_strategy(strategy, both, None, None)[0] is both


def test_named_dims_take_precedence_over_the_shape() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("host", "local", "tp"))
    both = DataParallelMeshDims(shard="local", replicate="host")
    for strategy in HYBRID:
        assert resolve_strategy(strategy, mesh, both, None)[0] is mesh
    for dims in (DataParallelMeshDims(shard=("host", "local")), DataParallelMeshDims(replicate="host")):
        with pytest.raises(MeshError, match="needs a 2-d mesh"):
            resolve_strategy(ShardingStrategy.HYBRID_SHARD, mesh, dims, None)
    with pytest.raises(MeshError, match="replicates over 2 and shards over 2 ranks"):
        resolve_strategy(ShardingStrategy.FULL_SHARD, mesh, both, None)


@pytest.mark.parametrize(
    ("told", "found"), [("8", "LOCAL_WORLD_SIZE=8"), ("3", "LOCAL_WORLD_SIZE=3"), (None, "LOCAL_WORLD_SIZE is not set")]
)
def test_hybrid_strategies_need_several_hosts(told: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    with pytest.raises(MeshError) as caught:
        resolve_strategy(ShardingStrategy.HYBRID_SHARD, None, None, None)
    assert str(caught.value) == (
        f"strategy=HYBRID_SHARD shards within a host and replicates over hosts, but {found} for 8 ranks: there is one "
        "host only, or not as many ranks on each. Pass mesh=. Make one with init_device_mesh('cpu', (hosts, 8 // "
        "hosts), mesh_dim_names=('replicate', 'shard'))."
    )


@pytest.mark.parametrize(
    ("strategy", "reshard", "text"),
    [
        ("FULL_SHARD", False, "FULL_SHARD frees parameters after forward, but reshard_after_forward=False keeps them."),
        ("FULL_SHARD", 1, "FULL_SHARD frees parameters after forward, but reshard_after_forward=1 keeps them."),
        ("SHARD_GRAD_OP", True, "SHARD_GRAD_OP keeps parameters after forward, but reshard_after_forward=True frees"),
        ("SHARD_GRAD_OP", 2, "SHARD_GRAD_OP keeps parameters after forward, but reshard_after_forward=2 frees them."),
        ("NO_SHARD", True, "NO_SHARD keeps parameters after forward, but reshard_after_forward=True frees them."),
    ],
)
def test_options_that_contradict_a_strategy_are_refused(strategy: str, reshard: bool | int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve_strategy(ShardingStrategy[strategy], None, None, reshard)
    with pytest.raises(ConfigurationError, match=r"Leave one of the two out\."):
        resolve_strategy(ShardingStrategy[strategy], None, None, reshard)


def test_options_that_agree_with_the_strategy_are_kept() -> None:
    for reshard in (True, 2, None):
        assert resolve_strategy(ShardingStrategy.FULL_SHARD, None, None, reshard)[1] is reshard
