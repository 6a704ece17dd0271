"""Test ``benchmarks/soak.py`` in a short form: some sixteen faults in a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_module

SEED = "253"
"""Faults: a kill, short stalls, one beyond patience, exceptions on one and on all ranks."""


@pytest.mark.behaviour("H-01", "H-03", "H-05", "F-12")
def test_training_survives_repeated_faults(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    options = ("--quick", "--ranks", "2", "--timeout", "6", "--seed", SEED, "--out", out)
    done = run_module("tests.helpers.forked_soak", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {row["what"]: row["count"] for row in json.loads(out.read_text())["rows"]}
    assert counts["problems"] == 0
    assert counts["steps"] >= 24
    assert counts["all faults"] >= 6
    assert counts["states of a rank compared with the undisturbed round"] >= 2
