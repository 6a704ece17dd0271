"""Runs the Python blocks of the documentation: those of pages, those of docstrings, and whole programs.

A block with ``>>>`` shows its results, which are compared. Of any other block, each statement must run. A page is one
session of what a reader sees: HTML comments are left out. A block after ``<!-- not run: reason -->`` is not run; the
pages that may have one are in ``NOT_RUN``.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import json
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import composable_fsdp
import tests.simulation
from tests.helpers.comparison.page import PAGE, render
from tests.helpers.fresh_process import run_program, run_script_on_ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOT_RUN = {"docs/how-to/cuda-graphs.md", "docs/upstream.md"}
"""Pages with a block that cannot run here: it needs a GPU, or ends when torch has corrupted memory."""
NEEDS = {"docs/how-to/hugging-face.md": ["transformers"], "docs/how-to/low-precision.md": ["torchao"]}
"""Optional packages of pages."""
ANYTHING = "whatever it shows\n"
"""The wanted output of statements in blocks without ``>>>``."""


class _Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == ANYTHING or super().check_output(want, got, optionflags)


def python_blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Return the number of the line before each visible block of Python that runs, and its lines."""
    text = re.sub(r"<!--(?! not run: ).*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
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
    if module.name != "composable_fsdp.testing"  # an import of it raises
    for test in module_examples(module.name)
]


@pytest.fixture(autouse=True)
def _destroy_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():  # an example failed before its last line
        dist.destroy_process_group()


def test_there_are_examples_to_run() -> None:
    assert {"docs/quickstart.md", "docs/compatibility.md"} <= {test.name for test in PAGES}
    assert DOCSTRINGS


@pytest.mark.parametrize("test", [pytest.param(test, id=test.name) for test in PAGES + DOCSTRINGS])
def test_docs_examples_pass(test: doctest.DocTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    for package in NEEDS.get(test.name, ()):
        pytest.importorskip(package, reason=f"needs {package}: make install")
    assert not failures(test), failures(test)


@pytest.mark.multiprocess
@pytest.mark.behaviour("E-01", "E-08", "E-09")
@pytest.mark.parametrize("name", ["own_codec", "own_tensor"])
def test_documented_extensions_train_on_two_ranks(name: str) -> None:
    said = run_script_on_ranks(f"examples/{name}.py")
    losses = [float(value) for value in re.findall(r"step +\d+: loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 100
    if name == "own_codec":
        assert re.search(r"ratio 0\.26$", said, re.MULTILINE), said
    else:
        assert "rank 1 holds a RowInt8 of (128, 32)" in said


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--whole",)], ids=["blocks", "whole"])
def test_the_program_of_the_compile_page_has_the_losses_of_the_eager_model(options: tuple[str, ...]) -> None:
    said = run_script_on_ranks("examples/compiled.py", "--backend", "aot_eager", *options)
    assert said.count("0e+00 from the eager model") == 2, said


@pytest.mark.multiprocess
def test_the_program_of_the_reinforcement_page_is_rewarded_more_and_more() -> None:
    said = run_script_on_ranks("examples/grpo.py", "--steps", "26")
    rewards = [float(reward) for reward in re.findall(r"^step \d+ reward ([\d.]+)$", said, re.MULTILINE)]
    assert rewards[0] < 0.2 < 0.5 < rewards[-1], said


@pytest.mark.multiprocess
def test_the_program_of_the_pipeline_page_trains() -> None:
    said = run_script_on_ranks("examples/pipeline.py", ranks=4)
    losses = [float(loss) for loss in re.findall(r"step (?:4|19) loss ([\d.]+)", said)]
    assert len(losses) == 4
    assert min(losses) < max(losses) / 2


@pytest.mark.multiprocess
def test_the_program_of_the_context_parallel_page_has_the_gradients_of_whole_sequences() -> None:
    said = run_script_on_ranks("examples/context_parallel.py")
    differences = re.findall(r"gradients (\S+) from", said)
    assert len(differences) == 2
    assert all(float(difference) < 1e-6 for difference in differences), said


@pytest.mark.multiprocess
def test_the_program_of_the_experts_page_trains_as_one_process_and_resumes_on_other_meshes(tmp_path: Path) -> None:
    for options, ranks, steps in (
        (("--tp", "2", "--ep", "2", "--steps", "4"), 4, "1 to 4"),
        (("--ep", "2", "--resume", "--steps", "6"), 2, "5 to 6"),
    ):
        said = run_script_on_ranks("examples/experts.py", "--out", str(tmp_path), *options, ranks=ranks)
        differences = re.findall(rf"steps {steps}, loss \S+; parameters (\S+) from those of one process", said)
        assert len(differences) == ranks, said
        assert all(float(difference) < 1e-6 for difference in differences), said


@pytest.mark.multiprocess
def test_the_program_of_the_profiler_page_writes_profiles_with_labels_of_groups() -> None:
    assert re.search(r"FSDP::all_gather \(0\) +\d+ times", run_script_on_ranks("examples/profiled.py"))
    assert (ROOT / "runs" / "profile" / "rank-1.json").exists()


@pytest.mark.multiprocess
def test_the_program_of_the_data_page_sees_every_sample_once_over_a_stop_and_another_number_of_ranks(tmp_path) -> None:
    first = run_script_on_ranks("examples/resume_data.py", "--out", str(tmp_path), "--stop", "5")
    second = run_script_on_ranks("examples/resume_data.py", "--out", str(tmp_path), "--stop", "16", ranks=1)
    steps = [int(step) for step in re.findall(r"rank 0 step (\d+) ", first + second)]
    assert steps == list(range(1, 17))
    samples = [int(each) for found in re.findall(r"samples \[(.*?)\]", first + second) for each in found.split(",")]
    assert sorted(samples) == list(range(128))


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--nf4",)], ids=["lora", "qlora"])
def test_the_program_of_the_peft_page_trains(options: tuple[str, ...]) -> None:
    for package in ("peft", "transformers", "torchao"):  # `make clients` installs them
        pytest.importorskip(package)
    said = run_script_on_ranks("examples/qlora.py", *options)
    losses = [float(loss) for loss in re.findall(r"rank 0 step \d loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.5
    assert "12 adapters, 14,336 values" in said


@pytest.mark.multiprocess
def test_the_tutorial_trains_and_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = ("--out", str(tmp_path), "--save-every", "20")
    first = run_script_on_ranks("examples/own_gpt.py", *options, "--steps", "30")
    losses = [float(loss) for loss in re.findall(r"\bloss ([\d.]+)", first)]
    assert losses[-1] < losses[0] - 0.5
    assert "steps 1 to 30; evaluation:" in first
    second = run_script_on_ranks("examples/own_gpt.py", *options, "--steps", "32", ranks=1)
    assert "steps 31 to 32; evaluation:" in second


def first_program() -> str:
    """Return the program that README, front page and quickstart show, without its docstring."""
    return (ROOT / "examples" / "first.py").read_text().split('"""\n\n', 1)[1]


def shown_by(command: str) -> list[str]:
    """Return the lines that the README shows below ``command``, of which this is the begin."""
    found = re.search(rf"^\$ {re.escape(command)}.*\n((?:.+\n)+?)```$", README.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].splitlines()


def test_readme_front_page_and_quickstart_show_the_same_program() -> None:
    assert f"```python\n{first_program()}```\n" in README.read_text()
    for page in ("index.md", "quickstart.md"):
        assert "```{literalinclude} ../examples/first.py" in (ROOT / "docs" / page).read_text()


def test_the_readme_has_at_most_90_lines() -> None:
    assert len(README.read_text().splitlines()) <= 90


def test_the_first_program_says_under_plain_python_how_to_start_it() -> None:
    path = str(ROOT / "examples" / "first.py")
    done = run_program(f"import runpy; runpy.run_path({path!r}, run_name='__main__')")
    assert done.returncode == 1
    assert "Start one process per device with `torchrun --nproc-per-node N script.py`" in done.stderr


@pytest.mark.multiprocess
def test_the_first_program_trains_on_two_ranks_and_its_schedule_is_that_of_the_readme(tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(first_program().replace("shutdown()  #", "    print(model.schedule())\nshutdown()  #"))
    said = run_script_on_ranks(program)
    losses = [float(loss) for loss in re.findall(r"rank 0 step \d loss ([\d.]+)", said)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert "\n".join(shown_by("torchrun --standalone --nproc-per-node 2 examples/first.py | grep")) in said


@pytest.mark.multiprocess
def test_the_readme_shows_the_error_of_the_other_rank(tmp_path: Path) -> None:
    program, line = tmp_path / "first.py", 'if rank == 1 and step == 3: raise ValueError("a bad batch")'
    assert f"`{line}`" in README.read_text()
    program.write_text(first_program().replace("    loss.backward()", f"    {line}\n    loss.backward()"))
    said = run_script_on_ranks(program, fails=True)
    own, *other = shown_by("torchrun --standalone --nproc-per-node 2 examples/first.py 2>&1 | grep")
    assert f"[rank1]: {own}" in said
    shown = re.escape(" ".join(other)).replace("58", r"\d+")
    assert re.search(rf"\[rank0\]: composable_fsdp\.errors\.{shown}", said), said


def test_the_plan_of_the_readme_is_made_by_its_command() -> None:
    command = re.search(r"^\$ composable-fsdp (plan .*?) \| sed", README.read_text(), re.MULTILINE)
    assert command is not None
    program = f"import os; os.chdir({str(ROOT)!r}); from composable_fsdp.cli import main; main()"
    done = run_program(program, *command[1].split())
    assert done.stdout.splitlines()[2:6] == shown_by("composable-fsdp plan"), done.stdout + done.stderr


def test_only_listed_pages_have_blocks_that_are_not_run() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    found = {path.relative_to(ROOT).as_posix() for path in pages if "<!-- not run: " in path.read_text()}
    assert found == NOT_RUN


def test_a_broken_example_is_reported_with_its_line() -> None:
    page = "Text.\n\n```python\n>>> 1 + 1\n3\n```\n\n```console\n>>> not Python\n```\n"
    (test,) = page_examples(page, "page.md")
    assert len(test.examples) == 1
    assert re.search(r'"page\.md", line 4.*Expected:\s+3\s+Got:\s+2', failures(test), re.DOTALL)


def test_statements_without_prompts_run_unless_the_page_says_why_not() -> None:
    page = (
        "<!--\n```python\n>>> f = z = 1\n```\n-->\n\n```python\n>>> x = 1\n```\n\n"
        "- In a list:\n\n  ```python\n  def f(y):\n      return y\n\n\n"
        "  f(x)\n  f(z)\n  ```\n\n<!-- not run: a reason -->\n\n```python\nf(w)\n```\n"
    )
    (test,) = page_examples(page, "page.md")
    report = failures(test)
    assert re.search(r'"page\.md", line 19.*f\(z\).*NameError: name \'z\' is not defined', report, re.DOTALL), report
    assert report.count("Failed example") == 1


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text() == render(), "regenerate the page: python -m tests.helpers.comparison.page"


def test_the_figures_of_the_front_page_are_those_of_the_newest_results() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "front_page.py"))
    assert made["PAGE"].read_text() == made["render"](), "regenerate them: python benchmarks/front_page.py"


def test_make_help_shows_what_users_need_first() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    users, maintainers = said.split("\nFor maintainers:\n")
    assert re.findall(r"^  (\S+)", users, re.MULTILINE) == ["install", "demo", "test", "test-fast", "docs"]
    assert {"bench", "clients", "upstream"} <= set(re.findall(r"^  (\S+)", maintainers, re.MULTILINE))


WRONG = "from torch import nn\nnn.Sequential().set_schedule(prefetch_limit=2)\n"
"""A program with an error in line 2: nobody has said that the model is sharded."""


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
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


def checked(folder: Path, *command: str | Path) -> str:
    return subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=280).stdout


@pytest.mark.multiprocess
def test_mypy_accepts_the_programs(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy: make install")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\n")
    options = ("--check-untyped-defs", "--follow-imports", "silent")
    said = checked(tmp_path, sys.executable, "-m", "mypy", *options, *programs)
    assert re.fullmatch(r"wrong\.py:2: error: .*not callable.*\nFound 1 error in 1 file .*\n", said), said


@pytest.mark.multiprocess
def test_pyright_accepts_the_programs(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="needs pyright: pip install pyright, which fetches its own package of npm")
    # torch does not export HashStore in the way that pyright asks for.
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "reportPrivateImportUsage": False})
    )
    command = (sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson")
    found = json.loads(checked(tmp_path, *command, *programs))["generalDiagnostics"]
    assert {(Path(each["file"]).name, each["range"]["start"]["line"]) for each in found} == {("wrong.py", 1)}, found
