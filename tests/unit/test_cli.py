"""The console command: its entry points, errors, exit codes, and ``run``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

import composable_fsdp
from tests.helpers.fresh_process import run_module, run_program

pytest.importorskip("typer", reason="needs typer: pip install '.[cli]'")

from typer.testing import CliRunner, Result

from composable_fsdp.cli.app import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(composable_fsdp.__file__).parents[1]


def run(*arguments: str | Path, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


# -- entry points


def test_the_console_command_is_the_main_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["composable-fsdp"].partition(":")
    assert getattr(import_module(module), function) is composable_fsdp.cli.main
    for package in ("typer", "rich"):
        assert any(each.startswith(package) for each in project["optional-dependencies"]["cli"])


@pytest.mark.multiprocess
def test_runs_as_a_module(tmp_path: Path) -> None:
    done = run_module("composable_fsdp", "checkpoint", "inspect", tmp_path)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]  # builds of torch for CUDA log before it that they miss triton
    assert error == f"error: {tmp_path} is not a checkpoint, and no complete checkpoint is in it."


@pytest.mark.multiprocess
@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_a_missing_package_is_named(absent: str) -> None:
    done = run_program(f"import sys; sys.modules[{absent!r}] = None\nfrom composable_fsdp.cli import main\nmain()")
    assert done.returncode == 2
    assert done.stderr == (f'This command needs {absent}, which is not installed: pip install "composable_fsdp[cli]"\n')


def test_every_command_has_help_with_an_example() -> None:
    for words in (
        "doctor",
        "timeline",
        "run",
        "checkpoint inspect",
        "checkpoint verify",
        "checkpoint convert",
        "diagnostics merge",
    ):
        shown = run(*words.split(), "--help")
        assert shown.exit_code == 0
        assert f"composable-fsdp {words}" in " ".join(shown.stdout.replace("_", "-").split()), words
    assert "Exit codes: 0 on success;" in run("--help").stdout


# -- errors


def test_errors_are_one_line_unless_their_tracebacks_are_asked_for(tmp_path: Path) -> None:
    arguments = ("checkpoint", "inspect", tmp_path / "nothing")
    plain = run(*arguments)
    assert plain.exit_code == 1
    assert plain.stderr == f"error: {tmp_path / 'nothing'} is not a checkpoint, and it does not exist.\n"
    for found in (run("--traceback", *arguments), run(*arguments, environment={"COMPOSABLE_FSDP_TRACEBACK": "1"})):
        assert isinstance(found.exception, composable_fsdp.FSDPError)
        assert found.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["novel"], "No such command 'novel'"),
        (["checkpoint", "inspect"], "Missing argument"),
        (["run"], "Missing argument"),
        (["run", "-m"], "error: -m needs the name of a module."),
        (["run", "novel.py"], "error: there is no program novel.py."),
    ],
)
def test_invalid_commands_have_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


# -- run


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(2, 2))
print(__name__, *sys.argv[1:], *[base.__module__ for base in type(model).__mro__[1:3]])
"""


@pytest.mark.multiprocess
@pytest.mark.behaviour("I-01")
@pytest.mark.parametrize("flags", [("program.py",), ("-m", "program")])
def test_an_unchanged_torch_program_runs_on_this_library(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "composable_fsdp", "run", *flags, "--steps", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "__main__ --steps 3 composable_fsdp._api.fsdp_module torch.distributed.fsdp\n", done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "code", "text"), [("sys.exit(7)", 7, ""), ("raise KeyError('own')", 1, "in <module>\n    raise KeyError")]
)
def test_a_program_ends_as_it_does_without_the_command(tmp_path: Path, end: str, code: int, text: str) -> None:
    (tmp_path / "program.py").write_text(f"import sys\nassert '--help' in sys.argv\n{end}\n")
    done = run_module("composable_fsdp", "run", tmp_path / "program.py", "--help")
    assert (done.returncode, text in done.stderr) == (code, True), done.stderr
    assert "SystemExit" not in done.stderr


UNUSED = "composable-fsdp run: this process sharded nothing. Its program did not call fully_shard of "


@pytest.mark.multiprocess
@pytest.mark.parametrize("uses", [False, True])
def test_a_program_that_sharded_nothing_says_so(tmp_path: Path, uses: bool) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM) if uses else "print('done')")
    done = run_module("composable_fsdp", "run", tmp_path / "program.py")
    assert (done.returncode, UNUSED in done.stderr) == (0, not uses), done.stderr
