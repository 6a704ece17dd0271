"""The error text if ranks built different models."""

from __future__ import annotations

import pytest
import torch

from composable_fsdp import DivergenceError
from tests._internals import LoopbackCommunicator, difference_text, verify_same, verify_same_lines


def test_the_first_difference_is_shown_for_all_ranks_and_the_rest_for_two() -> None:
    usual, other = ["same", "b 1", "c"], ["same", "b 2", "c"]
    text = difference_text("a model", {0: usual, 1: other, 2: usual, 3: ["same"]})
    assert text.splitlines()[:7] == [
        "Ranks have built different models. The first difference in a model:",
        "  ranks 0, 2: b 1",
        "  rank 1: b 2",
        "  rank 3: nothing more",
        "From rank 0 (-) to rank 1 (+):",
        "  -b 1",
        "  +b 2",
    ]


def test_many_differences_are_truncated() -> None:
    text = difference_text("a model", {0: [f"a{i}" for i in range(50)], 1: [f"b{i}" for i in range(50)]})
    assert "\n  and 88 lines more\n" in text


def test_many_ranks_are_truncated() -> None:
    text = difference_text("a model", {rank: ["usual" if rank else "other"] for rank in range(100)})
    assert "\n  ranks 1, 2, 3, 4, 5, 6, 7, 8, ...: usual\n  rank 0: other\n" in text


@pytest.mark.behaviour("H-02")
def test_a_single_rank_compares_nothing() -> None:
    verify_same(["a"], (LoopbackCommunicator(), LoopbackCommunicator()), torch.device("cpu"), "a model")


@pytest.mark.behaviour("H-02")
def test_gathered_lines_are_compared_in_full() -> None:
    verify_same_lines("a model", {0: ["a", "b"], 1: ("a", "b")})
    with pytest.raises(DivergenceError, match=r"The first difference in a model:\n  rank 0: b\n  rank 1: nothing more"):
        verify_same_lines("a model", {0: ["a", "b"], 1: ["a"]})
