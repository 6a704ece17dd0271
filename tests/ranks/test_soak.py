"""Test ``benchmarks/soak.py`` in a short form: about seven faults in a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.behaviour("H-01", "H-03", "H-05", "F-12")
def test_training_survives_repeated_faults(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--quick", "--ranks", "2", "--timeout", "6", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {row["what"]: row["count"] for row in json.loads(out.read_text())["rows"]}
    assert counts["problems"] == 0
    assert counts["steps"] >= 24
    assert counts["all faults"] >= 6
    assert counts["states of a rank compared with the undisturbed round"] >= 2
