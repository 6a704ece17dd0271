"""Packing of the payloads of several buckets into the message of an all-gather, and of gradients into messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import fully_shard
from tests._internals import AllGatherBuffers, Collective, group_by_key, pack_messages
from tests.helpers.fake_world import FakeWorld
from tests.helpers.sharding import fake_ranks

HOST = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@example([[(0, torch.float32), (0, torch.bfloat16)]])
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=3), min_size=1, max_size=4))
def test_every_gather_gets_its_payloads_from_every_rank(shapes: list[list[tuple[int, torch.dtype]]]) -> None:
    ranks = [
        [
            AllGatherBuffers(
                [], [torch.full((numel,), 10 * rank + k).to(dtype) for k, (numel, dtype) in enumerate(payloads)]
            )
            for payloads in shapes
        ]
        for rank in range(2)
    ]
    world = FakeWorld(len(ranks))
    communicators = [world.communicator(rank) for rank in range(len(ranks))]
    works = [
        c.launch(Collective.ALL_GATHER, pack_messages(gathers, c, HOST))
        for gathers, c in zip(ranks, communicators, strict=True)
    ]
    for work in works:
        work.wait()
    for gathers in ranks:
        for i, gather in enumerate(gathers):
            assert len(gather.rows) == len(shapes[i])
            for k, rows in enumerate(gather.rows):
                sent = torch.stack([from_rank[i].payloads[k] for from_rank in ranks])
                assert rows.dtype == sent.dtype
                assert torch.equal(rows, sent)


def test_a_single_payload_is_sent_without_a_copy() -> None:
    payload = torch.ones(3)
    (transfer,) = pack_messages([AllGatherBuffers([], [payload])], FakeWorld(2).communicator(0), HOST)
    assert transfer.input is payload


@given(st.lists(st.integers(0, 3)))
def test_items_with_equal_keys_are_grouped_in_order_of_first_occurrence(keys: list[int]) -> None:
    found = group_by_key(keys, range(len(keys)))
    assert [key for key, _ in found] == list(dict.fromkeys(keys))
    for key, members in found:
        assert members == [place for place, each in enumerate(keys) if each == key]


class ChunkCats(TorchDispatchMode):
    """Keeps the results of the operation that copies gradients to the rows of all ranks, each time that it is called.
    Memory that is allocated holds NaN, to show what is not written."""

    observes_sharding = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty and result.is_floating_point():
            result.fill_(float("nan"))
        if func.overloadpacket is torch.ops.aten._chunk_cat:
            self.rows.append(result.clone())
        return result


def rows_of_gradients(rows: int, columns: int) -> list[torch.Tensor]:
    """Train a linear layer on the first of 4 ranks, and return the rows that one operation writes, with NaN before."""
    cats = ChunkCats()
    with fake_ranks(4):
        model = nn.Linear(columns, rows)
        fully_shard(model)
        with cats:
            (model(torch.ones(1, columns)) * torch.arange(1.0, rows + 1)).sum().backward()
    return cats.rows


@pytest.mark.parametrize(("columns", "gaps"), [(3, 0), (101, 1)])
def test_one_operation_writes_gradients_and_the_zeros_between_them(columns: int, gaps: int) -> None:
    """Three rows of the weight for each rank, which is aligned if it is long enough for that to add little."""
    (rows,) = rows_of_gradients(10, columns)
    values, numel = torch.cat([torch.arange(1.0, 11), torch.zeros(2)]).view(4, 3), 3 * columns
    weight, zeros, bias, more_zeros, flags = rows.split([numel, gaps, 3, gaps, 2 + 2 * gaps], dim=1)
    assert torch.equal(weight, values.repeat_interleave(columns, dim=1))
    assert torch.equal(bias, values)
    assert zeros.eq(0).all()
    assert more_zeros.eq(0).all()
    assert flags.eq(1).all()


@pytest.mark.parametrize(("rows", "fused"), [(512, True), (511, False)])
def test_a_large_gradient_is_not_padded_by_a_further_copy_on_a_host(rows: int, fused: bool) -> None:
    assert bool(rows_of_gradients(rows, 300)) == fused
