"""torch's ``DistributedDataParallel`` around a model of which a part is sharded, and a state dict taken once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import fully_shard
from tests._internals import local_part
from tests.helpers.run_ranks import on_ranks


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.left_out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.left_out(x)) - self.shift


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = Body(), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shift


def replicate_around_a_sharded_part() -> None:
    """Let DDP reduce what FSDP ignores and what is outside of it, and FSDP the rest, in every step."""
    torch.manual_seed(0)
    model = Outer()
    reference = DistributedDataParallel(copy.deepcopy(model))
    ignored = set(model.body.left_out.parameters())
    fully_shard(model.body, ignored_params=ignored)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert sharded == ["body.shift", "body.inner.weight", "body.inner.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    around = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (around, reference)]
    for _ in range(3):
        x = torch.randn(2, 4, generator=generator)
        for each, optimizer in pairs:
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            full = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(full, theirs, msg=name)


def keep_a_state_dict() -> None:
    for dim in (2, 3):
        model = fully_shard(nn.Linear(dim, dim, bias=False), reshard_after_forward=True)
        optimizer, state = torch.optim.AdamW(model.parameters(), lr=0.1), model.state_dict()
        for step in range(3):
            before = state["weight"].full_tensor()
            model(torch.full((2, dim), 1.0 + step)).sum().backward()
            optimizer.step()
            assert local_part(state["weight"]).data_ptr() == local_part(model.weight).data_ptr()
            assert not torch.equal(state["weight"].full_tensor(), before)
        model.load_state_dict({"weight": torch.full_like(state["weight"], 5.0)})
        assert local_part(model.weight).data_ptr() == local_part(state["weight"]).data_ptr()
        assert bool((state["weight"].full_tensor() == 5).all())


@pytest.mark.behaviour("A-11", "F-02")
@on_ranks(2)
def test_ddp_around_a_sharded_part_and_a_state_dict_that_is_kept() -> None:
    replicate_around_a_sharded_part()
    keep_a_state_dict()
