"""Statistics of the benchmarks, and the generation of ``RESULTS.md`` from result files."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", name="tables")
def _tables() -> ModuleType:
    return _script("tables")


@pytest.fixture(scope="module", name="results")
def _results() -> ModuleType:
    return _script("results_table")


def _script(name: str) -> ModuleType:
    """Import a benchmark. Benchmarks are scripts in one folder, not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "step time",
        "date": "2026-01-01T10:00:00+00:00",
        "command": "benchmarks/step_time.py",
        "settings": {"ranks": 2},
        "machine": {"cpus": 2},
        "columns": ["case", "ratio"],
        "rows": [{"case": "gpt", "ratio": 0.5}],
    } | changes


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30))
def test_the_interval_contains_the_median_and_is_within_the_samples(samples: list[float]) -> None:
    found = _script("tables").spread(samples)
    assert found["median"] == statistics.median(samples)
    assert min(samples) <= found["low"] <= found["median"] <= found["high"] <= max(samples)
    assert found["runs"] == len(samples)


def test_the_interval_covers_the_true_median_at_its_confidence(tables: ModuleType) -> None:
    import random

    draw = random.Random(1)
    intervals = [tables.spread([draw.gauss(1.0, 0.1) for _ in range(25)]) for _ in range(100)]
    assert 88 <= sum(interval["low"] <= 1.0 <= interval["high"] for interval in intervals) <= 100


def test_ratios_are_of_samples_taken_side_by_side(tables: ModuleType) -> None:
    assert tables.ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0])["low"] == 0.5
    with pytest.raises(ValueError, match="shorter"):
        tables.ratios([1.0, 2.0], [1.0])


def test_a_table_shows_intervals_three_digits_and_dashes(tables: ModuleType) -> None:
    rows = [{"a": {"median": 0.5, "low": 0.4001, "high": 0.6}, "b": 1234.5}, {"a": "text", "b": 7}, {"a": None}]
    assert tables.table(rows, ["a", "b"]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 0.5 [0.4, 0.6] | 1234 |",
        "| text | 7 |",
        "| – | – |",
    ]


def test_the_page_names_command_file_and_machine(results: ModuleType) -> None:
    page = results.page([document(file="a.json")])
    assert "## Step time: ranks 2\n\n| case | ratio |\n| --- | --- |\n| gpt | 0.5 |\n" in page
    assert "`benchmarks/step_time.py`, 2026-01-01T10:00:00+00:00, [a.json](results/a.json); cpus 2." in page


def test_without_files_the_page_says_how_to_make_them(results: ModuleType) -> None:
    assert "There are no results yet: `make bench`." in results.page([])
