"""Comparison of the initial values of all ranks."""

from __future__ import annotations

import zlib

import pytest
import torch

from tests._internals import Values, differing_starts, start_details

CUT, LOADED, CONSTANT = bytes(range(64)), bytes(range(64, 128)), bytes(64)


def values(name: str, start: int, shard: bytes = CUT, then: bytes | None = None) -> Values:
    """Return a parameter whose full values had the sample ``start`` when they were sharded."""
    return Values.of(name, torch.empty(4, 4), shard, start.to_bytes(8, "little"), shard if then is None else then)


@pytest.mark.behaviour("J-01")
def test_ranks_that_began_with_other_values_are_named_by_parameter() -> None:
    of_ranks = [
        [values("a", 1), values("b", start), values("c", start, LOADED, CUT if rank == 3 else None)]
        for rank, start in enumerate((1, 2, 1, 2))
    ]
    of_ranks[0][0] = values("a", 7, CONSTANT)
    details = {rank: start_details(own) for rank, own in enumerate(of_ranks)}
    found = differing_starts(details, "abc")
    assert list(found) == ["b"]
    assert list(found["b"].values()) == [[0, 2], [1, 3]]


@pytest.mark.behaviour("J-01")
def test_rank_reports_after_loading_a_checkpoint_are_small() -> None:
    """Ranks with an empty shard cannot know that a load changed the values on other ranks, so all ranks report."""
    names = [f"parameter 'layers.{i}.weight' of group 'layers.{i}'" for i in range(1000)]
    filled = start_details([values(name, i, LOADED, CUT) for i, name in enumerate(names)])
    some_empty = start_details([values(n, i, *((b"",) if i % 5 else (LOADED, CUT))) for i, n in enumerate(names)])
    assert filled != some_empty
    assert max(len(zlib.compress(text.encode())) for text in (filled, some_empty)) < 200
    assert differing_starts({0: filled, 1: some_empty}, names) == {}
