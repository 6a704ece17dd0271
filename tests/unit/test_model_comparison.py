"""The error texts if ranks built different models, or began with other values."""

from __future__ import annotations

import pytest
import torch

from tests._internals import LoopbackCommunicator, Values, difference_text, differing_starts, equal_shards, verify_same


def test_the_first_difference_is_shown_for_all_ranks() -> None:
    usual, other = ["same", "b 1", "c"], ["same", "b 2", "c"]
    text = difference_text("a model", {0: usual, 1: other, 2: usual, 3: ["same"]})
    assert text.splitlines()[:-1] == [
        "Ranks have built different models. The first difference in a model:",
        "  ranks 0, 2: b 1",
        "  rank 1: b 2",
        "  rank 3: nothing more",
    ]


def test_many_ranks_are_shown_as_a_range() -> None:
    text = difference_text("a model", {rank: ["usual" if rank else "other"] for rank in range(100)})
    assert "\n  ranks 1-99: usual\n" in text


@pytest.mark.behaviour("H-02")
def test_a_single_rank_compares_nothing() -> None:
    verify_same(["a"], (LoopbackCommunicator(), LoopbackCommunicator()), torch.device("cpu"), "a model")


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
    found = differing_starts({rank: [each.shown_start for each in own] for rank, own in enumerate(of_ranks)}, "abc")
    assert found == {"b": [[0, 2], [1, 3]]}


@pytest.mark.behaviour("J-01")
def test_ranks_with_an_empty_shard_have_no_start() -> None:
    """They cannot know that a load changed the values on other ranks."""
    filled, empty = values("a", 1, LOADED, CUT), values("a", 2, b"")
    assert differing_starts({0: [filled.shown_start], 1: [empty.shown_start]}, "a") == {}
    assert values("a", 1).start == values("a", 1, b"").start  # or summaries differed, and all ranks gathered all starts


@pytest.mark.behaviour("J-01")
def test_equal_shards_are_one_table_that_repeats_itself_or_a_fault() -> None:
    shard_ranks = {0: 0, 1: 1, 2: 0, 3: 1}
    replicas = {rank: [f"x{rank % 2}", f"y{rank % 2}", "any"] for rank in range(4)}
    assert equal_shards(replicas, "abc", shard_ranks) == {}
    table = {rank: ["x", y, z] for rank, (_, y, z) in replicas.items()}
    assert equal_shards(table, "abc", shard_ranks) == {}
    assert equal_shards({rank: ["x", "y", "any"] for rank in range(4)}, "abc", shard_ranks) == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2, 3],
    }
