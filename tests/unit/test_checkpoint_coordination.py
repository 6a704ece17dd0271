"""Coordination of checkpoints: reports of mismatches and errors of several ranks."""

from __future__ import annotations

import pickle

import pytest

from composable_fsdp.errors import CheckpointError
from tests._internals import Mismatch, join_rank_texts, leave_common_unexpected, mismatch_text, refuse, said


def test_equal_errors_are_shown_once_and_others_name_their_ranks() -> None:
    assert join_rank_texts({0: "bad", 1: "bad"}, 2) == "bad"
    assert join_rank_texts({0: "bad", 1: "bad"}, 3) == "ranks 0, 1: bad"
    assert join_rank_texts({1: "worse", 2: "bad", 3: "worse"}, 4) == "ranks 1, 3: worse; rank 2: bad"


def test_differences_are_reported_by_kind_with_the_ranks_that_have_them() -> None:
    first = Mismatch(missing={"a": "x"}, unexpected={"b": "y", "c": "z"}, others=["same", "own"])
    second = Mismatch(missing={"a": "x"}, unexpected={"c": "z", "e": "v"}, others=["same"], dtypes={"f": "u"})
    leave_common_unexpected([first, second])
    assert mismatch_text({0: first, 2: second}).splitlines() == [
        "  missing (1):",
        "    a: x",
        "  unexpected (1):",
        "    c: z",
        "  of another dtype (1):",
        "    f: u (on rank 2)",
        "  same",
        "  own (on rank 0)",
    ]
    with pytest.raises(CheckpointError, match=r"^it does not fit\. Nothing was loaded\.\n  missing \(1\):\n    a: x$"):
        refuse("it does not fit", {0: Mismatch(missing={"a": "x"})})
    refuse("it does not fit", {0: Mismatch(), 1: Mismatch()})


def test_errors_are_printed_in_full_without_colors_or_stacks() -> None:
    assert said(ValueError("one.\ntwo.")) == "ValueError: one.\ntwo"
    assert said(RuntimeError("\x1b[1mlost\x1b[0m.\nException raised from f at a.cpp:1 (most")) == "RuntimeError: lost"
    colourful = "Weights only load failed. \x1b[1mdo those steps\x1b[0m.\n\tWeightsUnpickler error: "
    refused = "Unsupported global: GLOBAL a.B was not an allowed global by default. Please use x.\n\nCheck the docs."
    assert said(pickle.UnpicklingError(colourful + refused)) == (
        "UnpicklingError: it has an object of the class a.B, which torch.load(weights_only=True) does not admit. If "
        "you trust whoever wrote it, call torch.serialization.add_safe_globals([a.B]) first"
    )
    assert (
        said(pickle.UnpicklingError(f"{colourful}Unsupported operand 0\n")) == "UnpicklingError: Unsupported operand 0"
    )


def test_long_lists_are_truncated() -> None:
    lines = mismatch_text({0: Mismatch(missing={f"layers.{i}.weight": "float32 (2,)" for i in range(33)})}).splitlines()
    assert lines[0] == "  missing (33):"
    assert lines[1:3] == ["    layers.0.weight: float32 (2,)", "    layers.1.weight: float32 (2,)"]
    assert lines[21:] == ["    and 13 more"]
