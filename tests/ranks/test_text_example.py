"""``examples/train_text.py`` on two ranks: it checks itself, resumes, and does not run over checkpoints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--batch", "2", "--seq", "32", "--layers", "1", "--dim", "32", "--heads", "2", "--hidden", "64"]


needs_extras = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("matplotlib", "psutil", "rich")),
    reason="what the examples show needs the extras cli and plot",
)


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *torchrun,
        "examples/train_text.py",
        *SMALL,
        "--validation-batches",
        "1",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@needs_extras
@pytest.mark.behaviour("F-07", "F-12")
def test_it_trains_verifies_and_goes_on_where_it_was(tmp_path: Path) -> None:
    first = run(tmp_path, "--steps", "7", "--verify")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "resumed at step 2: parameters and AdamW state equal to those saved" in first.stdout
    assert "sharded against unsharded: ok" in first.stdout
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000007"]

    refused = run(tmp_path, "--steps", "9")
    assert refused.returncode != 0
    assert f"{tmp_path} already holds step-00000007: pass --resume to go on from there" in refused.stderr

    (tmp_path / "step-00000007" / "manifest.json").unlink()  # as if it had never been finished
    resumed = run(tmp_path, "--steps", "9", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed at step 4: parameters and AdamW state equal to those saved" in resumed.stdout

    again = run(tmp_path, "--steps", "2", "--overwrite")
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
