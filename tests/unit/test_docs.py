"""Runs the examples in the documentation: ``>>>`` examples of pages and docstrings, and the README's program."""

from __future__ import annotations

import doctest
import importlib
import io
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import composable_fsdp
from tests.helpers.comparison.page import PAGE, render
from tests.helpers.torchrun import torchrun

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def python_lines(text: str) -> Iterator[str]:
    """Blank the lines of a page outside Python blocks, so that line numbers stay the same."""
    inside = False
    for line in text.splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        yield line if inside and not fence else ""


def page_examples(text: str, name: str) -> list[doctest.DocTest]:
    """Return the examples of a page as one session."""
    test = doctest.DocTestParser().get_doctest("\n".join(python_lines(text)), {}, name, name, 0)
    return [test] if test.examples else []


def module_examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a module. Every docstring is a session that starts with the module's names."""
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


def failures(test: doctest.DocTest) -> str:
    """Return doctest's report on the examples that fail, or an empty text."""
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    return report.getvalue()


PAGES = [
    test
    for path in [README, *sorted((ROOT / "docs").glob("*.md"))]
    for test in page_examples(path.read_text(), path.relative_to(ROOT).as_posix())
]
DOCSTRINGS = [
    test
    for module in pkgutil.walk_packages(composable_fsdp.__path__, f"{composable_fsdp.__name__}.")
    for test in module_examples(module.name)
]


@pytest.fixture(autouse=True)
def _destroy_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():  # an example failed before its last line
        dist.destroy_process_group()


def test_there_are_examples_to_run() -> None:
    assert {"docs/quickstart.md", "docs/coming-from-fsdp2.md"} <= {test.name for test in PAGES}
    assert DOCSTRINGS


@pytest.mark.parametrize("test", [pytest.param(test, id=test.name) for test in PAGES + DOCSTRINGS])
def test_docs_examples_pass(test: doctest.DocTest) -> None:
    assert not failures(test), failures(test)


@pytest.mark.multiprocess
@pytest.mark.behaviour("E-01", "E-08", "E-09")
@pytest.mark.parametrize("name", ["own_codec", "own_tensor"])
def test_documented_extensions_train_on_two_ranks(name: str) -> None:
    said = torchrun(f"examples/{name}.py")
    losses = [float(value) for value in re.findall(r"step +\d+: loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 100
    if name == "own_codec":
        assert re.search(r"total .* 0\.26$", said, re.MULTILINE), said
    else:
        assert "rank 1 holds a RowInt8 of (128, 32)" in said


@pytest.mark.multiprocess
def test_readme_program_runs_on_two_ranks(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    program = tmp_path / "train.py"
    program.write_text(block[1])
    torchrun(program)


def test_a_broken_example_is_reported_with_its_line() -> None:
    page = "Text.\n\n```python\n>>> 1 + 1\n3\n```\n\n```console\n>>> not Python\n```\n"
    (test,) = page_examples(page, "page.md")
    assert len(test.examples) == 1
    assert re.search(r'"page\.md", line 4.*Expected:\s+3\s+Got:\s+2', failures(test), re.DOTALL)


def test_a_docs_page_is_one_session() -> None:
    page = "```python\n>>> x = 1\n```\n\nText.\n\n```python\n>>> x\n1\n```\n"
    (test,) = page_examples(page, "page.md")
    assert failures(test) == ""


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text() == render(), "regenerate the page: python -m tests.helpers.comparison.page"
