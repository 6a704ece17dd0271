"""Writes to parameters between passes while they are unsharded: kept in the shards, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.codecs import CommunicationPolicy, Int8
from composable_fsdp.errors import LifecycleError, ParameterError
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import values_of
from tests.helpers.transports import TRANSPORTS, Environment


def sharded(**settings: Any) -> tuple[Any, nn.Sequential]:
    """Return a model of two groups, of uneven rows, and the same unsharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    reference = copy.deepcopy(model)
    fully_shard(model[0], **settings)
    return fully_shard(model, **settings), reference


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def check(model: nn.Module, reference: nn.Module) -> None:
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], msg=name)
    torch.testing.assert_close(model(batch()), reference(batch()))


def average(model: nn.Module) -> None:
    for k, parameter in enumerate(model.parameters()):
        parameter.lerp_(torch.ones_like(parameter), 0.1 * (k + 1))


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.1)


def one_row(model: Any) -> None:
    model[0].weight[0].zero_()  # a row of rank 0, on whose shard alone the change is seen


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(torch.full_like(parameter, 0.25))


WRITES: dict[str, Callable[[Any], None]] = {"average": average, "clip": clip, "one row": one_row, "swap": swap}


def write(replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("r", "s"))
    for name, change in WRITES.items():
        for next_use in ("reshard", "evaluation", "training"):
            model, reference = sharded(mesh=mesh if replicas > 1 else mesh["s"], reshard_after_forward=False)
            with torch.no_grad():
                if name == "clip":
                    for module in (model, model[0]):
                        module.unshard()
                else:
                    model(batch())
                for each in (model, reference):
                    change(each)
                if next_use == "evaluation":
                    torch.testing.assert_close(model(batch(1)), reference(batch(1)))
            if next_use == "training":
                for each in (model, reference):
                    each(batch(2)).square().sum().backward()
                model.zero_grad()
            model.reshard()
            model[0].reshard()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            with torch.no_grad():
                check(model, reference)


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("environment", TRANSPORTS.values(), ids=TRANSPORTS)
def test_writes_between_passes_are_kept(environment: Environment) -> None:
    run_ranks(write, 2, 1, environment=environment)


@pytest.mark.behaviour("C-08")
def test_writes_between_passes_are_kept_on_one_rank_and_on_a_hybrid_mesh() -> None:
    run_ranks(write, 1, 1)
    run_ranks(write, 4, 2)


def write_through_data() -> None:
    """Neither torch nor an optimizer hook sees the write. The forward has gradients, and no backward."""
    model, _ = sharded()
    before = values_of(model)
    model(batch()).sum().item()
    for parameter in (model[2].weight, model[2].bias):
        assert not isinstance(parameter, DTensor)
        parameter.data.add_(0.5)
    dist.barrier()
    with pytest.raises(
        ParameterError, match=r"\['2.weight', '2.bias'\] of 'root' were changed.*\.data.*after module.resh"
    ):
        model.reshard()
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    model(batch()).sum().backward()


@pytest.mark.behaviour("C-08", "H-02")
@pytest.mark.parametrize("environment", TRANSPORTS.values(), ids=TRANSPORTS)
def test_writes_through_data_change_no_other_rank_and_are_named(environment: Environment) -> None:
    run_ranks(write_through_data, 2, environment=environment)


def refuse() -> None:
    model, _ = sharded(reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(batch())
        model[0].weight.mul_(0.5)
        with pytest.raises(
            ParameterError, match=r"\['weight'\] of '0'.*unsharded in torch.bfloat16, and its shard is in"
        ):
            model[0].reshard()
        model[2].bias.add_(1)
        with pytest.raises(ParameterError, match=r"\['2.bias'\] of 'root'.*It was dropped. Change the sharded"):
            model(batch())

    model, _ = sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    with torch.no_grad():
        model[0].unshard()
        model[0].weight.mul_(0.5)
    optimizer.step()
    with pytest.raises(ParameterError, match=r"'weight' has a shard that has changed since"):
        model(batch())

    model, _ = sharded()
    loss = model(batch()).sum()
    with torch.no_grad():
        model[2].bias.mul_(3)
    with pytest.raises(LifecycleError, match=r"changed in place between forward and backward: \['2.bias'\]"):
        loss.backward()
    model.reset_iter_state()

    model, _ = sharded(reshard_after_forward=False, comm_policy=CommunicationPolicy(all_gather=Int8(), min_numel=1))
    with torch.no_grad():
        model(batch())
        model(batch())
        model[0].weight.mul_(0.5)
        with pytest.raises(ParameterError, match=r"'weight' is gathered in another form"):
            model[0].reshard()


@pytest.mark.behaviour("H-02")
@pytest.mark.parametrize("environment", TRANSPORTS.values(), ids=TRANSPORTS)
def test_writes_that_cannot_be_kept_are_refused(environment: Environment) -> None:
    run_ranks(refuse, 2, environment=environment)


class Renormed(nn.Module):
    """An embedding that shortens rows of its unsharded weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids)
        return out.square().sum()


def write_in_forward() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(Renormed())
    before = values_of(model)
    for _ in range(2):
        model(torch.tensor([0, 5])).backward()
        model(torch.tensor([1, 5])).item()
        model.reshard()
        with torch.no_grad():
            model(torch.tensor([2]))
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.behaviour("C-08")
def test_writes_of_modules_in_their_forward_are_no_error_without_shared_shards() -> None:
    run_ranks(write_in_forward, 2, environment=TRANSPORTS["copies"])


def step_while_unsharded() -> None:
    """What an optimizer or a hand-written step does to the shards counts, though full parameters are kept."""
    for by_hand in (False, True):
        model, reference = sharded()
        listed = list(model.parameters())
        for m in (model, reference):
            m(batch()).square().sum().backward()
        model(batch()).sum().item()  # keeps the group of the root
        for parameters in (listed, list(reference.parameters())):
            if by_hand:
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            else:
                torch.optim.SGD(parameters, lr=0.1, foreach=True).step()
        model.reshard()
        check(model, reference)


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("environment", TRANSPORTS.values(), ids=TRANSPORTS)
def test_changed_shards_are_not_overwritten_by_kept_parameters(environment: Environment) -> None:
    run_ranks(step_while_unsharded, 2, environment=environment)
