"""The table of ``describe`` for models on any number of simulated ranks."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import MixedPrecisionPolicy, ShardingStrategy, describe, fully_shard, no_sync
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.wrap import by_class
from tests.helpers.models import Block, Chain, Transformer
from tests.helpers.sharding import fake_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with fake_ranks(8):
        yield


@pytest.mark.behaviour("B-01", "A-10")
def test_a_table_row_describes_one_group() -> None:
    with torch.device("meta"):
        model = Transformer(tied=True)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("host", "local"))
    policy = by_class(Block, nn.Embedding, nn.Linear, reshard_after_forward=2)
    ignored = model.norm.weight
    fully_shard(
        model,
        policy=policy,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
        ignored_params={ignored},
    )
    description = describe(model)
    groups = {group.names: group for group in description.groups}
    assert description.unsharded == {"norm.weight": 48}
    root, embedding, head = groups[("",)], groups[("embedding",)], groups[("head",)]
    assert [group.names for group in description.groups if group.is_root] == [("",)]
    assert root.after_forward == "keep"
    assert (root.parameters, root.bytes) == (12, 48), "only the bias of the norm is in the root group"
    assert embedding.classes == ("Embedding",)
    assert (embedding.parameters, embedding.bytes) == (23 * 12, 23 * 12 * 4)
    assert embedding.bytes_per_rank >= 6 * 12 * 4, "23 rows on 4 ranks are at least 6 rows per rank"
    assert embedding.placements == ("R S(0)",)
    assert embedding.meshes == ("cpu host 2 x local 4",)
    assert embedding.dtypes == ((F32, BF16, F32),)
    assert embedding.after_forward == "keep 1/2"
    assert embedding.tied == head.tied == (("embedding.weight", "head.weight"),)
    assert (head.parameters, head.bytes, head.dtypes, head.placements) == (0, 0, (), ())
    assert head.meshes == embedding.meshes


@pytest.mark.behaviour("B-02")
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_groups_tell_what_happens_after_forward(strategy: ShardingStrategy, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = fully_shard(Chain(), policy={nn.Linear}, strategy=strategy)
    keeps = strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    assert {group.after_forward for group in describe(model).groups[1:]} == {"keep" if keeps else "free"}


def test_the_error_for_parameters_on_several_meshes_shows_all_of_them() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = Chain(depth=1)

    def place(path: str, module: nn.Module, _: object) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh["tp"], [Shard(0)]))

    distribute_module(model, mesh["tp"], place)
    model.layers[0].bias = nn.Parameter(torch.zeros(8))
    fully_shard(model, mesh=mesh["dp"])
    (group,) = describe(model).groups
    assert group.meshes == ("cpu dp 4 x tp 2", "cpu dp 4")
    assert len(group.placements) == 2


def test_a_list_is_one_row_and_all_roots_are_named() -> None:
    model = nn.ModuleDict({"a": Chain(depth=3), "b": Chain(depth=3)})
    layers: Any = model["a"].layers
    fully_shard(list(layers[:2]))
    fully_shard(layers[2])
    fully_shard(model["a"])
    fully_shard(model["b"])
    groups = describe(model).groups
    assert [(g.names, g.classes, g.is_root) for g in groups] == [
        (("a",), ("Chain",), True),
        (("a.layers.0", "a.layers.1"), ("Linear", "Linear"), False),
        (("a.layers.2",), ("Linear",), False),
        (("b",), ("Chain",), True),
    ]


TABLE = """\
group                                class   parameters  bytes  per rank  after forward
(model) [root]                       Chain            0    0 B       0 B  keep
layers.0 ... layers.9 (each of 10)   Linear          72  288 B      36 B  free
layers.10                            Linear          72  288 B      36 B  keep
layers.11 ... layers.19 (each of 9)  Linear          72  288 B      36 B  free
All groups: placement: S(0); mesh: cpu 8; dtypes (rest, compute, reduce): float32, float32, float32.
21 groups, 5.76 kB in full, 720 B on this rank."""


@pytest.mark.behaviour("B-01")
def test_the_table_folds_equal_adjacent_rows_and_shows_common_settings_once() -> None:
    model = Chain(depth=20)
    fully_shard(model.layers[10], reshard_after_forward=False)
    fully_shard(model, policy={nn.Linear})
    assert str(describe(model)) == TABLE


def test_omitted_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(100, 50), *[nn.Linear(2, 2) for _ in range(7)], nn.Linear(50, 100))
    fully_shard(model[1])
    fully_shard(model, ignored_modules=list(model)[2:8])
    *_, summary, left = str(describe(model)).splitlines()
    assert summary == "2 groups, 40.6 kB in full, 5.52 kB on this rank."
    assert left == (
        "Not sharded, being ignored or in no group: 12 parameters, 144 B: 2.weight, 2.bias, 3.weight, 3.bias, 4.weight"
        ", ..."
    )


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no module of this Chain is sharded: apply fully_shard first\."):
        describe(Chain())


def test_describing_a_model_that_is_being_sharded_changes_nothing() -> None:
    model = Chain()
    fully_shard(model.layers[0])
    assert [group.is_root for group in describe(model).groups] == [True]
    fully_shard(model)
    assert [group.is_root for group in describe(model).groups] == [True, False]
    with no_sync(model):
        model(torch.ones(1, 8)).sum().backward()
    assert len(describe(model).groups) == 2


@pytest.mark.behaviour("B-01")
def test_a_plan_for_a_large_model_on_a_thousand_ranks_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark: Any = importlib.import_module("describe")
    begin = time.process_time()
    rows, description = benchmark.measure(10, 1024)
    assert time.process_time() - begin < 5
    assert [row["part"] for row in rows] == ["build on meta", "shard", "describe", "print"]
    assert len(description.groups) == 11
    assert sum(group.parameters for group in description.groups) == 10 * 679_493_632 + 2_101_362_688 + 128_256
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
