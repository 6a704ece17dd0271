"""What is said of a checkpoint that does not fit."""

from __future__ import annotations

import pytest

from composable_fsdp.checkpoint.fit import Misfit


def test_what_any_rank_misses_and_what_none_expects() -> None:
    first = Misfit(missing={"a": "x"}, unexpected={"b": "y", "c": "z"}, others=["same"])
    second = Misfit(missing={"d": "w"}, unexpected={"c": "z", "e": "v"}, others=["same", "own"], dtypes={"f": "u"})
    total = Misfit.of_all([first, second])
    assert total == Misfit({"a": "x", "d": "w"}, {"c": "z"}, {}, {"f": "u"}, ["same", "own"])
    assert first.others == ["same"]


@pytest.mark.parametrize("kind", ["missing", "unexpected", "shapes", "dtypes"])
def test_only_shapes_matter_if_not_strict(kind: str) -> None:
    misfit = Misfit(**{kind: {"a": "x"}})  # type: ignore[arg-type]
    assert misfit.is_fatal(strict=True)
    assert misfit.is_fatal(strict=False) == (kind == "shapes")
    assert not Misfit().is_fatal(strict=True)
    assert str(Misfit()) == ""


def test_long_lists_are_cut() -> None:
    lines = str(Misfit(missing={f"layers.{i}.weight": "float32 (2,)" for i in range(33)})).splitlines()
    assert lines[0] == "  missing in the checkpoint (33):"
    assert lines[1:3] == ["    layers.0.weight: float32 (2,)", "    layers.1.weight: float32 (2,)"]
    assert lines[21:] == ["    and 13 more"]
