"""Test that shards in memory shared by the ranks of one host need no all-gather and give the same results."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ParameterError
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import buckets_of, local


@on_ranks(2)
def test_each_shard_is_a_storage_of_its_own() -> None:
    model = shard_layers(TASKS["mlp"].build(), fully_shard)
    for name, parameter in model.named_parameters():
        shard = local(parameter.detach())
        assert shard.untyped_storage().nbytes() == shard.nbytes, name
        file = io.BytesIO()
        torch.save(shard, file)
        assert file.tell() < shard.nbytes + 4096, "the file must not contain the shards of other ranks"
        file.seek(0)
        torch.testing.assert_close(torch.load(file), shard)
    (bucket,) = buckets_of(model.get_submodule("layers.0"))
    versions = [tensor._version for tensor in bucket.versioned]
    with torch.no_grad():
        local(bucket.parameters[0].sharded).add_(1)
    assert [tensor._version for tensor in bucket.versioned] > versions


class Touching(nn.Module):
    """An embedding with ``max_norm`` and a layer whose weight is written back to itself in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, max_norm=100.0)
        self.linear = nn.Linear(4, 4)
        self.touches = True
        self.writes_to: slice | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.touches:
                self.linear.weight.set_(self.linear.weight)  # type: ignore[call-overload]
            if self.writes_to is not None:
                self.linear.weight[self.writes_to] += 1
        out: torch.Tensor = self.linear(self.embed(tokens) if self.touches else self.embed.weight[tokens])
        return out.square().sum()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["shards", "cast"])
@on_ranks(2)
def test_a_write_that_changes_no_value_is_no_error(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = fully_shard(Touching(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        loss = model(torch.tensor([0, 3, 5]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True), losses
    rows = slice(2, 4) if dist.get_rank() == 0 else slice(0, 2)
    model.writes_to = rows  # the part of the other rank, found on the rank that wrote
    with pytest.raises(ParameterError, match=r"parameters \['linear.weight'\] were changed in place while"):
        model(torch.tensor([0, 3, 5]))


@on_ranks(2)
def test_a_first_write_after_the_first_forward_says_that_values_may_be_unchanged() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(Touching(), reshard_after_forward=True)
    model.touches = False
    tokens = torch.tensor([0, 3, 5])
    model(tokens).backward()
    model.touches = True
    with pytest.raises(ParameterError, match=r"\['embed.weight', 'linear.weight'\] .*values were not recorded in this"):
        model(tokens)
    model.reset_iter_state()
    for _ in range(2):
        model(tokens).backward()
    model.writes_to = slice(0, 4)
    with pytest.raises(ParameterError, match=r"parameters \['linear.weight'\] were changed in place (?!.*recorded)"):
        model(tokens)


@on_ranks(2)
def test_no_rank_steps_while_another_still_reads() -> None:
    """Delay one rank, which still computes with the shards while the others have finished and would step."""
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard)

    def dawdle(*_: object) -> None:
        if rank == 1:
            time.sleep(0.2)

    def dawdle_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(dawdle)

    model.get_submodule("layers.3").register_forward_pre_hook(dawdle)
    model.get_submodule("layers.0").register_forward_hook(dawdle_in_backward)

    def play(played: nn.Module, step: int, played_rank: int) -> torch.Tensor:
        loss = task.loss(played, task.batch_of(step, played_rank))
        loss.backward()
        return loss.detach()

    reference = task.build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for step in range(3):
        with torch.no_grad():  # after this evaluation each rank writes immediately
            torch.testing.assert_close(model(*task.batch_of(9, rank)[:-1]), reference(*task.batch_of(9, rank)[:-1]))
            for parameter in model.parameters():
                local(parameter).mul_(1.5)
            for parameter in reference.parameters():
                parameter.mul_(1.5)
        own = play(model, step, rank)
        losses = [play(reference, step, other) for other in range(2)]
        torch.testing.assert_close(own, losses[rank])
        for parameter in reference.parameters():
            parameter.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def layers_in_one_group() -> tuple[Any, nn.Module]:
    """Return two layers in one group, which stay unsharded after forward, and the second layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return fully_shard(model, reshard_after_forward=False), model[1]


@pytest.mark.parametrize("is_unsharded_by_hand", [True, False], ids=["by hand", "by a forward"])
@on_ranks(2)
def test_no_rank_steps_while_another_evaluates_kept_parameters(is_unsharded_by_hand: bool) -> None:
    """Run a forward without an all-gather before a step, with rank 1 late in it."""
    model, second = layers_in_one_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = torch.ones(4, 32)
    second.register_forward_pre_hook(lambda *_: time.sleep(0.3 * dist.get_rank()))
    for _ in range(2):
        with torch.no_grad():
            expected = model(inputs)
        model(inputs).sum().backward()
        if is_unsharded_by_hand:
            model.unshard(async_op=True)
        else:
            model(inputs)  # has no backward
        with torch.no_grad():
            evaluated = model(inputs)
        optimizer.step()
        optimizer.zero_grad()
        model.reshard()
        torch.testing.assert_close(evaluated, expected, rtol=0, atol=0)


@on_ranks(2, timeout=30)
def test_an_optimizer_of_two_models_waits_for_the_readers_of_both() -> None:
    """Both models are kept unsharded by forwards without a backward, over process groups of their own."""
    models = [layers_in_one_group()[0]]
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",))
    models.append(fully_shard(nn.Sequential(nn.Linear(32, 32)), mesh=mesh, reshard_after_forward=False))
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.5)
    inputs = torch.ones(4, 32)
    for _ in range(5):
        for model in models:
            model(inputs).sum().backward()
        for model in models:
            model(inputs)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_one_rank_may_evaluate_kept_parameters_between_forwards() -> None:
    model, _ = layers_in_one_group()
    inputs = torch.ones(4, 32)
    loss = model(inputs).sum()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(inputs)
    for _ in range(3):
        loss = loss + model(inputs).sum()
    loss.backward()
    gradient = model.get_submodule("1").get_parameter("bias").grad
    assert gradient is not None
    assert local(gradient).eq(4 * len(inputs)).all()
