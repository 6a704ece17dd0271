"""Type checkers accept the programs that README, tutorial and the page on type checkers show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import README, ROOT, page_examples, python_blocks

pytestmark = pytest.mark.multiprocess

WRONG = "from torch import nn\nnn.Sequential().set_schedule(prefetch_limit=2)\n"
"""A program with an error in line 2: nobody has said that the model is sharded."""


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
    """The programs, and one with an error as the last."""
    program = "".join("\n".join(lines) + "\n" for _, lines in python_blocks(README.read_text()))
    (shown,) = re.findall(r"`(print\(step_schedule\(model\)\))`", README.read_text())
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = re.search(r"^## Type checkers$.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    (session,) = page_examples(section[0], "section")
    texts = {
        "readme": f"{program}\nfrom composable_fsdp import step_schedule\n{shown}\n",
        "tutorial": (ROOT / "examples" / "own_gpt.py").read_text(),
        "section": "".join(example.source for example in session.examples),
        "wrong": WRONG,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return [tmp_path / f"{name}.py" for name in texts]


def run(folder: Path, *command: str | Path) -> str:
    return subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=280).stdout


def test_mypy_accepts_the_programs(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy: make install")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\n")
    options = ("--check-untyped-defs", "--follow-imports", "silent")
    said = run(tmp_path, sys.executable, "-m", "mypy", *options, *programs)
    assert re.fullmatch(r"wrong\.py:2: error: .*not callable.*\nFound 1 error in 1 file .*\n", said), said


def test_pyright_accepts_the_programs(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="needs pyright: pip install pyright, which fetches its own package of npm")
    # torch does not export HashStore in the way that pyright asks for.
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "reportPrivateImportUsage": False})
    )
    command = (sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson")
    found = json.loads(run(tmp_path, *command, *programs))["generalDiagnostics"]
    assert {(Path(each["file"]).name, each["range"]["start"]["line"]) for each in found} == {("wrong.py", 1)}, found
