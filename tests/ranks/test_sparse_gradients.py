"""Embeddings with sparse gradients train as with dense ones: in own modules, in bags, used twice, and tied."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import values_of
from tests.helpers.transports import TRANSPORTS


class Lookup(nn.Module):
    """A table of its own class: only its backward shows that gradients are sparse."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 6))
        self.sparse = sparse

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table, sparse=self.sparse)


class Bags(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 6, mode="sum", sparse=sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bag(ids)
        return out.unsqueeze(1).expand(-1, ids.size(1), -1)


class Twice(nn.Module):
    """A table that is looked up twice, and multiplied with: autograd adds sparse gradients, and a dense one."""

    def __init__(self, *, sparse: bool, is_tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=sparse, padding_idx=3)
        self.is_tied = is_tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids) + 2 * self.table((ids + 1) % 11)
        return out @ self.table.weight.T @ self.table.weight if self.is_tied else out


TABLES: dict[str, Callable[..., nn.Module]] = {
    "function": Lookup,
    "bag": Bags,
    "used twice": lambda sparse: Twice(sparse=sparse, is_tied=False),
    "tied": lambda sparse: Twice(sparse=sparse, is_tied=True),
}


class Model(nn.Module):
    def __init__(self, table: Callable[..., nn.Module], *, sparse: bool) -> None:
        super().__init__()
        self.table = table(sparse=sparse)
        self.out = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(ids))
        return out.square().mean()


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(17 * step + rank))


def train(kind: str, *, sparse: bool, own_group: bool, replicas: int = 1) -> list[torch.Tensor]:
    """Return the losses, and the parameters, after steps of which the second has two microbatches."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("r", "s"))
    torch.manual_seed(0)
    model: Any = Model(TABLES[kind], sparse=sparse)
    settings: Any = {
        "mesh": mesh if replicas > 1 else mesh["s"],
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    }
    if own_group:
        fully_shard(model.table, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step, is_last in enumerate([True, False, True, True]):
        model.set_requires_gradient_sync(is_last)
        loss = model(ids_of(step, dist.get_rank()))
        loss.backward()
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *values_of(model).values()]


def compare(kind: str, own_group: bool, replicas: int) -> None:
    dense = train(kind, sparse=False, own_group=own_group, replicas=replicas)
    sparse = train(kind, sparse=True, own_group=own_group, replicas=replicas)
    for got, expected in zip(sparse, dense, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.mark.behaviour("C-04")
@pytest.mark.parametrize(("kind", "transport"), list(zip(TABLES, cycle(TRANSPORTS), strict=False)))
def test_sparse_gradients_train_as_dense_ones(kind: str, transport: str) -> None:
    for own_group in (True, False) if kind == "bag" else (True,):
        run_ranks(compare, 2, kind, own_group, 1, environment=TRANSPORTS[transport])


@pytest.mark.behaviour("C-04")
def test_sparse_gradients_on_one_rank_and_on_a_hybrid_mesh() -> None:
    run_ranks(compare, 1, "used twice", False, 1)
    run_ranks(compare, 4, "function", True, 2)
