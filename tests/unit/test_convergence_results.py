"""The documentation has the same figures as the results of training with codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "2026-11-21-convergence"


@pytest.mark.behaviour("E-10")
def test_int8_both_ways_with_error_feedback_ended_within_a_percent_of_fp32() -> None:
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    steps = data["settings"]["steps"]
    assert steps >= 300
    finals = {(run["variant"], run["seed"]): run["validation"][str(steps)] for run in data["runs"]}
    seeds = [seed for variant, seed in finals if variant == "int8-ef"]
    assert len(seeds) >= 3
    for seed in seeds:
        assert finals["int8-ef", seed] == pytest.approx(finals["fp32", seed], rel=0.01)


def test_the_documentation_has_the_table_of_the_results() -> None:
    page = (RESULTS / f"{NAME}.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) > 3
    assert "\n".join(table) in (ROOT / "docs" / "extensions.md").read_text()
