"""Payloads of several buckets in one message: what is left to do with what comes."""

from __future__ import annotations

import torch

from composable_fsdp.runtime.bucket import Gather
from composable_fsdp.runtime.messages import pack_messages
from composable_fsdp.testing import FakeWorld

HOST = torch.device("cpu")


Widths = tuple[int, ...]


def gather_of(payload: torch.Tensor, widths: Widths, copied: bool) -> Gather:
    places = [torch.zeros(2, width) for width in widths]
    return Gather([], [payload], places=places if copied else (), widths=widths if copied else ())


def exchanged(*buckets: tuple[Widths, bool]) -> tuple[torch.Tensor, list[list[Gather]], list[int]]:
    """Two ranks send the buckets of these widths, some of which are only to be copied.

    Returns:
        All that was sent, a row for each rank; the gathers of each rank; how many copies each makes.
    """
    sizes = [sum(widths) for widths, _ in buckets]
    sent = torch.arange(2.0 * sum(sizes)).view(2, -1)
    ranks = [
        [
            gather_of(part, widths, copied=copied)
            for part, (widths, copied) in zip(row.split(sizes), buckets, strict=True)
        ]
        for row in sent
    ]
    world = FakeWorld(len(ranks))
    communicators = [world.communicator(rank) for rank in range(len(ranks))]
    messages = [pack_messages(gathers, c, HOST) for gathers, c in zip(ranks, communicators, strict=True)]
    works = [c.all_gather(transfers) for c, (transfers, _) in zip(communicators, messages, strict=True)]
    for work in works:
        work.wait()
    for _, joints in messages:
        for joint in joints:
            joint.copy()
    return sent, ranks, [len(joints) for _, joints in messages]


def arrived(gathers: list[Gather]) -> torch.Tensor:
    return torch.cat([part for gather in gathers for part in (*gather.places, *gather.rows)], dim=1)


def test_what_is_only_to_be_copied_is_copied_at_once() -> None:
    sent, ranks, copies = exchanged(((16, 16), True), ((16,), True))
    assert copies == [1, 1]
    for gathers in ranks:
        assert not any(gather.rows for gather in gathers)
        assert torch.equal(arrived(gathers), sent)


def test_a_single_bucket_is_copied_too() -> None:
    for widths in ((32,), (16, 16)):
        sent, ranks, copies = exchanged((widths, True))
        assert copies == [1, 1]
        assert torch.equal(arrived(ranks[1]), sent)


def test_where_one_needs_more_it_gets_its_rows() -> None:
    sent, ranks, copies = exchanged(((16, 16), True), ((16,), False))
    assert copies == [1, 1]
    for gathers in ranks:
        assert [bool(gather.rows) for gather in gathers] == [False, True]
        assert torch.equal(arrived(gathers), sent)


def test_what_does_not_fit_end_to_end_is_copied_one_by_one() -> None:
    sent, ranks, copies = exchanged(((3,), True), ((3,), True))
    assert copies == [2, 2]
    assert torch.equal(arrived(ranks[0]), sent)
