"""Test that ``examples/train_text.py`` on two ranks verifies itself, resumes, and overwrites no checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_script_on_ranks

PROGRAM = "examples/train_text.py"
SMALL = ["--batch", "2", "--seq", "32", "--layers", "1", "--dim", "32", "--heads", "2", "--hidden", "64"]


needs_extras = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("matplotlib", "rich")),
    reason="what the examples show needs the extras cli and plot",
)


def flags(out: Path, *more: str) -> tuple[str, ...]:
    return (*SMALL, "--validation-batches", "1", "--device", "cpu", "--out", str(out), *more)


@needs_extras
@pytest.mark.behaviour("F-07", "F-12")
def test_the_text_example_trains_verifies_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "step-00000099").mkdir()
    said = run_script_on_ranks(PROGRAM, *flags(tmp_path, "--steps", "7", "--verify", "--overwrite"))
    assert "resumed at step 2: parameters and AdamW state equal to those saved" in said
    assert "sharded against unsharded: ok" in said
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000007"]

    refused = run_script_on_ranks(PROGRAM, *flags(tmp_path, "--steps", "9"), fails=True)
    assert f"{tmp_path} already holds step-00000007: pass --resume to go on from there" in refused

    (tmp_path / "step-00000007" / "manifest.json").unlink()  # as if the checkpoint had not been finished
    said = run_script_on_ranks(PROGRAM, *flags(tmp_path, "--steps", "9", "--resume"))
    assert "resumed at step 4: parameters and AdamW state equal to those saved" in said
