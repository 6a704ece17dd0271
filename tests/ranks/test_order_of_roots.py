"""Test that collectives of several roots are launched in the same order on every rank."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from tests._internals import Root
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import TRANSPORTS

LAYERS = 6


@pytest.mark.behaviour("G-01")
@pytest.mark.parametrize("occasion", ["assembly", "zero_grad"])
@on_ranks(2, transports=TRANSPORTS)
def test_former_roots_end_their_reductions_in_one_order(occasion: str) -> None:
    """Leave an all-reduce to be launched in each of several roots. A set of roots has another order on each rank."""
    rank, number, mesh = dist.get_rank(), count(1), init_device_mesh("cpu", (2, 1))
    with pytest.MonkeyPatch.context() as patch:
        numbers: dict[int, int] = {}
        sign = -1 if rank else 1
        patch.setattr(Root, "__hash__", lambda root: sign * numbers.setdefault(id(root), next(number)))
        parent: Any = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(LAYERS)])
        reduced: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(parent):
            fully_shard(layer, mesh=mesh)
            layer.set_is_last_backward(False)
            layer(torch.full((1, 4), 1.0 + index + 10 * rank)).sum().backward()
            note = lambda p, index=index: reduced.setdefault(index, p.grad.to_local().clone())  # noqa: E731
            layer.weight.register_post_accumulate_grad_hook(note)
        fully_shard(parent, mesh=mesh)
        assert not reduced
        if occasion == "assembly":
            parent(torch.ones(1, 4))
        else:
            parent.zero_grad()
    for index in range(LAYERS):
        assert torch.equal(reduced[index], torch.full((4, 4), 1.0 + index + 5)), (index, reduced[index])
