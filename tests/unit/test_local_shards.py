"""Which small shards an optimizer updates as one, and what comes back: on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from composable_fsdp import local_optimizer, local_shards, twins
from composable_fsdp.local_shards import JoinedShards, LocalShard, alike, is_small
from tests.ranks._sharding import single_rank, whole

pytestmark = pytest.mark.behaviour("C-01")


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    with single_rank():
        yield


def sharded(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Vectors with gradients, both of random numbers."""
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for size in sizes:
        values, gradient = torch.randn(2, size, generator=generator, dtype=dtype)
        parameters.append(nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])))
        parameters[-1].grad = distribute_tensor(gradient, mesh, [Shard(0)])
    return parameters


def shard(numel: int, entry: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> LocalShard:
    return LocalShard(None, torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype), entry or {})


def joined_by(optimizer: Optimizer) -> list[int]:
    """How many shards are updated as one, in one step, for each time that several are."""
    with mock.patch.object(twins, "JoinedShards", wraps=JoinedShards) as join:
        optimizer.step()
    return [len(call.args[0]) for call in join.call_args_list]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=30), st.integers(0, 60))
def test_all_that_are_alike_are_together_up_to_a_limit(drawn: list[tuple[int, int]], limit: int) -> None:
    shards = [shard(numel, {"step": torch.tensor(float(step))}) for numel, step in drawn]
    with mock.patch.object(local_shards, "JOINED_NUMEL", limit):
        runs = alike(shards)
    for step in range(3):
        ours = [id(each) for each in shards if each.entry["step"] == step]
        assert [id(each) for run in runs for each in run if each.entry["step"] == step] == ours
    for run in runs:
        assert run
        assert len({each.entry["step"].item() for each in run}) == 1
        assert len(run) == 1 or sum(each.values.numel() for each in run) <= limit


@pytest.mark.parametrize(
    ("names", "alike_with_plain"),
    [({}, True), ({"step": 1}, False), ({"step": torch.tensor(1.0)}, False), ({"moment": torch.ones(3)}, False)],
)
def test_other_state_keeps_shards_apart(names: dict[str, Any], alike_with_plain: bool) -> None:
    assert len(alike([shard(3), shard(3, names)])) == (1 if alike_with_plain else 2)


def test_state_of_elements_may_differ_and_all_else_may_not() -> None:
    first, other = torch.zeros(3), torch.ones(3)
    assert len(alike([shard(3, {"moment": first}), shard(3, {"moment": other})])) == 1
    assert len(alike([shard(3, {"factors": torch.ones(2)}), shard(3, {"factors": torch.ones(2)})])) == 2
    assert len(alike([shard(3, {"moment": first}), shard(3, {"moment": other.double()})])) == 2


@pytest.mark.parametrize(
    ("numel", "dtype", "gradient", "expected"),
    [
        (1024, torch.float32, torch.float32, True),
        (0, torch.float64, torch.float64, True),
        (1025, torch.float32, torch.float32, False),
        (3, torch.bfloat16, torch.bfloat16, False),
        (3, torch.float32, torch.bfloat16, False),
        (3, torch.complex64, torch.complex64, False),
    ],
    ids=str,
)
def test_which_shards_are_small(numel: int, dtype: torch.dtype, gradient: torch.dtype, expected: bool) -> None:
    assert is_small(LocalShard(None, torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=gradient), {})) is expected


def test_shards_of_other_classes_are_updated_by_themselves() -> None:
    class Packed(torch.Tensor):
        pass

    values = torch.ones(3).as_subclass(Packed)
    assert not is_small(LocalShard(None, values, torch.ones(3), {}))


def test_small_shards_are_updated_as_one_and_large_ones_by_themselves() -> None:
    optimizer = local_optimizer(torch.optim.AdamW(sharded(3, 2000, 1, 1024, 7)))
    assert joined_by(optimizer) == [4]
    assert joined_by(optimizer) == [4]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_fused_updates_which_round_the_ends_of_tensors_differently_are_left_alone(options: dict[str, Any]) -> None:
    optimizer = local_optimizer(torch.optim.AdamW(sharded(3, 4), **options))
    assert joined_by(optimizer) == ([2] if "foreach" in options else [])


def test_those_that_missed_a_step_are_updated_apart() -> None:
    parameters = sharded(3, 4, 5, 6)
    optimizer = local_optimizer(torch.optim.AdamW(parameters))
    held = [parameter.grad for parameter in parameters[:2]]
    parameters[0].grad = parameters[1].grad = None
    assert joined_by(optimizer) == [2]
    parameters[0].grad, parameters[1].grad = held
    assert joined_by(optimizer) == [2, 2]
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [1, 1, 2, 2]


def test_every_shard_has_state_of_its_own() -> None:
    parameters = sharded(3, 4)
    optimizer = local_optimizer(torch.optim.AdamW(parameters))
    optimizer.step()
    assert list(optimizer.state) == parameters
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].shape == parameter.shape
        local = state["exp_avg"].to_local()
        assert local.untyped_storage().nbytes() == local.nbytes
    first, second = (optimizer.state[parameter]["step"] for parameter in parameters)
    assert first.data_ptr() != second.data_ptr()


def test_state_that_users_hold_is_changed_in_place() -> None:
    parameters = sharded(3, 4)
    optimizer = local_optimizer(torch.optim.AdamW(parameters))
    optimizer.step()
    state = optimizer.state[parameters[0]]
    held, count = state["exp_avg"], state["step"]
    before = held.full_tensor().clone()
    optimizer.step()
    assert optimizer.state[parameters[0]]["exp_avg"] is held
    assert optimizer.state[parameters[0]]["step"] is count
    assert count == 2
    assert not torch.equal(held.full_tensor(), before)


def test_changes_are_counted_as_torch_counts_them() -> None:
    parameters = sharded(3, 4)
    versions = [parameter._version for parameter in parameters]
    optimizer = local_optimizer(torch.optim.SGD(parameters, lr=0.1))
    optimizer.step()
    assert [parameter._version > version for parameter, version in zip(parameters, versions, strict=True)] == [True] * 2


def test_what_an_update_did_before_it_failed_comes_back() -> None:
    parameters, unfit = sharded(3, 4), nn.Parameter(torch.ones(2000))
    unfit.grad = torch.ones(2000)
    optimizer = local_optimizer(torch.optim.SGD([*parameters, unfit], lr=0.5, momentum=0.9))
    before = [whole(parameter).clone() for parameter in parameters]
    real = torch.Tensor.add_

    def add(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        done = real(self, *args, **kwargs)
        if self.numel() == 7:
            raise RuntimeError("too many")
        return done

    with mock.patch.object(torch.Tensor, "add_", add), pytest.raises(RuntimeError, match="too many"):
        optimizer.step()
    held = optimizer.param_groups[0]["params"]
    assert [a is b for a, b in zip(held, [*parameters, unfit], strict=True)] == [True] * 3
    for parameter, old in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter), old - 0.5 * whole(parameter.grad))
    assert all(isinstance(key, nn.Parameter) for key in optimizer.state)
