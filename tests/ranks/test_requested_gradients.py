"""``backward(inputs=)`` and ``autograd.grad`` at parameters that were listed before the forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ParameterError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import TRANSPORTS, Environment


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.second = nn.Linear(7, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.second(self.first(x))))
        return out.square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(7 * step + rank))


def build(reshard_after_forward: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for module in (model.first, model.second, model):
        fully_shard(module, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return model, reference


REQUESTS = (["first.0.weight"], ["second.bias"], ["last.weight"], ["first.0.bias", "second.weight", "second.bias"])


def request(reshard_after_forward: bool) -> None:
    world = dist.get_world_size()
    for names in REQUESTS:
        model, reference = build(reshard_after_forward)
        listed, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
        for step in range(3):
            x = batch(step, dist.get_rank()).requires_grad_()
            model(x).backward(inputs=[x, *(listed[name] for name in names)])
            assert x.grad is not None
            for rank in range(world):
                (reference(batch(step, rank)) / world).backward(inputs=[theirs[name] for name in names])
            for name, parameter in listed.items():
                expected = theirs[name].grad
                assert (parameter.grad is None) == (expected is None), name
                if expected is not None:
                    torch.testing.assert_close(parameter.grad.full_tensor(), expected)
        model(batch(9, dist.get_rank())).backward()
        assert all(parameter.grad is not None for parameter in listed.values())


@pytest.mark.behaviour("C-04")
@pytest.mark.parametrize("environment", TRANSPORTS.values(), ids=TRANSPORTS)
def test_backward_sets_the_gradients_that_are_asked_for(environment: Environment) -> None:
    for reshard_after_forward in (True, False):
        run_ranks(request, 2, reshard_after_forward, environment=environment)


@pytest.mark.behaviour("H-02")
@on_ranks(2)
def test_autograd_grad_at_listed_parameters_names_them_and_the_remedy() -> None:
    model, _ = build(True)
    listed = dict(model.named_parameters())
    x = batch(0, dist.get_rank()).requires_grad_()
    for allow_unused in (False, True):
        with pytest.raises(ParameterError, match=r"at parameters 'weight' of 'second'.*after the forward.*inputs=\["):
            torch.autograd.grad(model(x), [x, listed["second.weight"]], allow_unused=allow_unused)
    model, _ = build(False)
    listed = dict(model.named_parameters())
    loss = model(x)
    shown = model.last.weight
    (gradient,) = torch.autograd.grad(loss, shown, retain_graph=True)
    assert gradient.shape == shown.shape
    loss.backward()

    own: Any = listed["first.0.weight"]
    of_shards: Any = torch.autograd.grad((own * own).sum(), own)[0]  # computed with the shards
    torch.testing.assert_close(of_shards.full_tensor(), 2 * own.full_tensor())
    with pytest.raises(ParameterError, match=r"'0.weight' of 'first', which were used both unsharded.*and sharded"):
        (model(x) + (own * own).sum().full_tensor()).backward(inputs=[own])
