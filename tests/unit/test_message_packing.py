"""Packing of several buckets' payloads into one message. Every all-gather gets its rows, for all dtypes."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from composable_fsdp.testing import FakeWorld
from tests._internals import AllGatherBuffers, Collective, group_by_key, pack_messages

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
