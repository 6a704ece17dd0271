"""Runs the Python blocks of the documentation: those of pages, those of docstrings, and whole programs.

A block with ``>>>`` shows its results, which are compared. Of any other block, each statement must run. A page is one
session; blocks in an HTML comment prepare it unseen. A block after ``<!-- not run: reason -->`` is not run.
"""

from __future__ import annotations

import ast
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
import tests.simulation
from tests.helpers.comparison.page import PAGE, render
from tests.helpers.fresh_process import run_script_on_ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


ANYTHING = "whatever it shows\n"
"""The wanted output of statements in blocks without ``>>>``."""


class _Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == ANYTHING or super().check_output(want, got, optionflags)


def python_blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Return the number of the line before each block of Python that runs, and its lines."""
    lines, began, indent, before = text.splitlines(), -1, 0, ""
    for number, line in enumerate(lines):
        if line.strip().startswith("```"):
            if began >= 0:
                yield began, [each.removeprefix(" " * indent) for each in lines[began + 1 : number]]
                began = -1
            elif line.strip() == "```python" and not before.startswith("<!-- not run: "):
                began, indent = number, len(line) - len(line.lstrip())
        before = line if line.strip() else before


def page_examples(text: str, name: str) -> list[doctest.DocTest]:
    """Return the examples of a page as one session."""
    parser, examples = doctest.DocTestParser(), list[doctest.Example]()
    for before, lines in python_blocks(text):
        source = "\n".join(lines)
        if any(line.startswith(">>>") for line in lines):
            found = parser.get_examples(source, name)
            for example in found:
                example.lineno += before + 1
            examples += found
            continue
        for node in ast.parse(source).body:
            begin = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            statement = "\n".join(lines[begin - 1 : node.end_lineno])
            examples.append(doctest.Example(statement, ANYTHING, lineno=before + begin))
    return [doctest.DocTest(examples, {}, name, name, 0, text)] if examples else []


def module_examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a module. Every docstring is a session that starts with the module's names."""
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


def failures(test: doctest.DocTest) -> str:
    """Return doctest's report on the examples that fail, or an empty text."""
    report = io.StringIO()
    doctest.DocTestRunner(_Checker(), verbose=False).run(test, out=report.write)
    return report.getvalue()


PAGES = [
    test
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for test in page_examples(path.read_text(), path.relative_to(ROOT).as_posix())
]
DOCSTRINGS = [
    test
    for package in (composable_fsdp, tests.simulation)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
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
    said = run_script_on_ranks(f"examples/{name}.py")
    losses = [float(value) for value in re.findall(r"step +\d+: loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 100
    if name == "own_codec":
        assert re.search(r"total .* 0\.26$", said, re.MULTILINE), said
    else:
        assert "rank 1 holds a RowInt8 of (128, 32)" in said


@pytest.mark.multiprocess
def test_the_tutorial_trains_and_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = ("--out", str(tmp_path), "--save-every", "20")
    first = run_script_on_ranks("examples/own_gpt.py", *options, "--steps", "30")
    losses = [float(loss) for loss in re.findall(r"\bloss ([\d.]+)", first)]
    assert losses[-1] < losses[0] - 0.5
    assert "steps 1 to 30; evaluation:" in first
    second = run_script_on_ranks("examples/own_gpt.py", *options, "--steps", "32", ranks=1)
    assert "steps 31 to 32; evaluation:" in second


@pytest.mark.multiprocess
def test_readme_program_runs_on_two_ranks(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    program = tmp_path / "train.py"
    program.write_text(block[1])
    run_script_on_ranks(program)


def test_a_broken_example_is_reported_with_its_line() -> None:
    page = "Text.\n\n```python\n>>> 1 + 1\n3\n```\n\n```console\n>>> not Python\n```\n"
    (test,) = page_examples(page, "page.md")
    assert len(test.examples) == 1
    assert re.search(r'"page\.md", line 4.*Expected:\s+3\s+Got:\s+2', failures(test), re.DOTALL)


def test_statements_without_prompts_run_unless_the_page_says_why_not() -> None:
    page = (
        "<!--\n```python\n>>> x = 1\n```\n-->\n\n- In a list:\n\n  ```python\n  def f(y):\n      return y\n\n\n"
        "  f(x)\n  f(z)\n  ```\n\n<!-- not run: a reason -->\n\n```python\nf(w)\n```\n"
    )
    (test,) = page_examples(page, "page.md")
    report = failures(test)
    assert re.search(r'"page\.md", line 15.*f\(z\).*NameError: name \'z\' is not defined', report, re.DOTALL), report
    assert report.count("Failed example") == 1


def test_a_docs_page_is_one_session() -> None:
    page = "```python\n>>> x = 1\n```\n\nText.\n\n```python\n>>> x\n1\n```\n"
    (test,) = page_examples(page, "page.md")
    assert failures(test) == ""


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text() == render(), "regenerate the page: python -m tests.helpers.comparison.page"
