"""Test that ``fully_shard(model, policy=...)`` and ``shared_from`` train like explicit calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.wrap import PolicyLike, by_class, by_size, every_module, transformer_blocks
from tests._internals import find_state, state_of
from tests.helpers.models import TASKS, Block, Transformer, seeded
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.helpers.training import OPTIMIZERS, check_parity, play_task

POLICIES: dict[str, PolicyLike] = {
    "class": {Block},
    "predicate": lambda module, name: isinstance(module, Block),
    "embedding and head apart": by_class(Block, nn.Embedding, nn.LayerNorm, nn.Linear),
    "size": by_size(100),
    "every module": every_module(),
    "blocks": transformer_blocks(),
}


class Recurrent(nn.Module):
    """Has one layer under three names. One name is inside a module that is called earlier."""

    def __init__(self) -> None:
        super().__init__()
        cell = nn.Linear(8, 8)
        self.first = nn.Sequential(cell, nn.Tanh())
        self.layers = nn.ModuleList([cell, nn.Linear(8, 8), cell])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.behaviour("B-01", "A-10")
@pytest.mark.parametrize("task", ["transformer", "tied"])
@on_ranks(2)
def test_every_policy_trains_with_parity_including_shared_weights(task: str) -> None:
    for name, policy in POLICIES.items():
        check_parity(
            TASKS[task].build,
            play_task(task),
            OPTIMIZERS["adamw-fused"],
            shard=partial(fully_shard, policy=policy),
            what=f"{task}, {name}",
        )


@pytest.mark.behaviour("B-01")
@on_ranks(2)
def test_shared_modules_are_one_group() -> None:
    for policy in ({nn.Linear}, every_module(), by_size(70)):
        model = check_parity(
            seeded(Recurrent), play_task("chain"), shard=partial(fully_shard, policy=policy), what=str(policy)
        )
        assert model.layers[0] is model.layers[2]
        (cell, _) = model.first.children()
        assert state_of(cell).name == "first.0"


@pytest.mark.behaviour("B-05", "B-01", "A-11")
@on_ranks(2)
def test_options_of_the_call_reach_all_groups_unless_overridden() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    other = MixedPrecisionPolicy(param_dtype=torch.float32)
    model = TASKS["tied"].build()

    def choose(module: nn.Module, name: str) -> bool | dict[str, Any]:
        if name == "layers.1":
            return {"mp_policy": other, "reshard_after_forward": False}
        return name in ("layers.0", "embedding", "head")

    frozen = model.get_parameter("norm.bias")
    assert fully_shard(model, policy=choose, mesh=mesh, mp_policy=precision, ignored_params={frozen}) is model
    sharded = {name: state for name, module in model.named_modules() if (state := find_state(module)) is not None}
    assert list(sharded) == ["", "embedding", "layers.0", "layers.1", "head"]
    assert all(state.group.axes.mesh == mesh for state in sharded.values())
    assert {name: state.options.precision.param_dtype for name, state in sharded.items()} == {
        name: torch.float32 if name == "layers.1" else torch.bfloat16 for name in sharded
    }
    assert [name for name, state in sharded.items() if state.options.reshard.kind.value == "never"] == ["layers.1"]
    assert model.get_parameter("norm.bias") is frozen
    assert sharded["head"].owner_states == (sharded["embedding"],)


@pytest.mark.behaviour("A-15", "A-12", "B-01")
@pytest.mark.parametrize("on_meta", [False, True])
@on_ranks(2)
def test_groups_are_initialised_and_synchronised_one_after_the_other(on_meta: bool) -> None:
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(len(calls) + 100 * dist.get_rank())

    for policy in ({Block, nn.Embedding, nn.Linear}, transformer_blocks()):
        calls.clear()
        torch.manual_seed(dist.get_rank())
        with torch.device("meta" if on_meta else "cpu"):
            model = Transformer(tied=True)
        before = [None if on_meta else values_of(model)]
        dist.broadcast_object_list(before)
        fully_shard(model, policy=policy, sync_module_states=True, param_init_fn=init if on_meta else None)
        values = values_of(model)
        assert model.head.weight is model.embedding.weight
        if before[0] is not None:
            for name, value in before[0].items():
                assert_exact(values[name], value, name)
        else:
            own = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
            assert len(calls) == len(own) - 1, "the head is skipped, because the embedding initialises its weight"
            assert {float(v.flatten()[0]) for v in values.values()} == set(map(float, range(1, len(own))))
