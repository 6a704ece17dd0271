"""Test ``examples/quantized_text.py``: its command line, files and checks.

``benchmarks/results`` has the results of 300 steps.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fresh_process import run_script_on_ranks
from tests.helpers.torchrun import ROOT

SMALL = ("--layers", "1", "--dim", "64", "--heads", "2", "--hidden", "96", "--batch", "2", "--seq", "32")

needs_extras = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("matplotlib", "rich")),
    reason="what the examples show needs the extras cli and plot",
)


@needs_extras
@pytest.mark.behaviour("E-10")
def test_the_example_trains_every_variant_and_writes_table_data_and_picture(tmp_path: Path) -> None:
    flags = ("--steps", "3", "--validation-batches", "2", "--variants", "fp32,int8,int8-ef", "--out", str(tmp_path))
    said = run_script_on_ranks("examples/quantized_text.py", *SMALL, *flags)
    assert "int8-ef against fp32, seed 0: " in said

    data = json.loads((tmp_path / "convergence.json").read_text())
    assert [run["variant"] for run in data["runs"]] == ["fp32", "int8", "int8-ef"]
    for run in data["runs"]:
        assert len(run["losses"]) == 3
        assert list(run["validation"]) == ["0", "3"]
        assert all(math.isfinite(loss) for loss in (*run["losses"], *run["validation"].values()))
    assert data["traffic"]["fp32"]["sent"] > 3 * data["traffic"]["int8"]["sent"]
    assert data["traffic"]["int8-ef"] == data["traffic"]["int8"]
    assert "| int8-ef | " in (tmp_path / "convergence.md").read_text()
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


def make_comparison(finals: dict[str, list[float]], steps: int) -> Any:
    """Return a comparison of runs that end with these validation losses, one seed after the other."""
    convergence, variants = (importlib.import_module(f"text.{name}") for name in ("convergence", "variants"))
    comparison = convergence.Comparison({"steps": steps}, {"commands": ["first"], "machine": "", "torch": ""})
    for variant, losses in finals.items():
        comparison.traffic[variant] = variants.WireBytes(sent=1, plain=4)
        for seed, loss in enumerate(losses):
            comparison.runs.append(convergence.Run(variant, seed, {0: 5.0, steps: loss}, [loss] * steps, 0.5))
    return comparison


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("quantized_text")


@needs_extras
@pytest.mark.behaviour("E-10")
@pytest.mark.parametrize(
    ("finals", "steps", "passed"),
    [
        ({"fp32": [2.0, 2.1], "int8-ef": [2.01, 2.09]}, 300, [True, True]),
        ({"fp32": [2.0, 2.1], "int8-ef": [2.01, 2.13]}, 300, [True, False]),
        ({"fp32": [2.0], "int8-ef": [math.nan]}, 300, [False]),
        ({"fp32": [2.0], "int8-ef": [3.0]}, 299, [True]),
        ({"fp32": [2.0], "int8": [3.0]}, 300, []),
        ({"int8-ef": [3.0]}, 300, []),
    ],
)
def test_int8_with_error_feedback_must_end_within_a_percent_for_every_seed(
    example: Any, finals: dict[str, list[float]], steps: int, passed: list[bool]
) -> None:
    assert [holds for _, holds in example.checks(make_comparison(finals, steps))] == passed
