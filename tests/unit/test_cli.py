"""The console command: its entry points, errors, exit codes, ``run`` and ``doctor``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import composable_fsdp
from composable_fsdp.checkpoint import save
from composable_fsdp.cli.doctor import Finding, check_launch, check_ranks, check_versions
from tests.helpers.command import Done, run_command
from tests.helpers.fresh_process import run_module, run_program
from tests.helpers.single_rank_checkpoints import trained

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(composable_fsdp.__file__).parents[1]
COMMANDS = ("doctor", "plan", "timeline", "run", "checkpoint inspect", "checkpoint convert")


def test_the_console_command_is_the_main_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["composable-fsdp"].partition(":")
    assert getattr(import_module(module), function) is composable_fsdp.cli.main


@pytest.mark.multiprocess
def test_every_command_works_with_the_package_and_torch_alone(tmp_path: Path) -> None:
    """In one process that cannot import packages which the extras install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()]
    names = {re.split(r"[^\w-]", each)[0] for group in needed for each in group if isinstance(each, str)}
    absent = [name.replace("-", "_") for name in sorted(names | {"typer", "click"})]
    calls = [[*words.split(), "--help"] for words in COMMANDS]
    (tmp_path / "model.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(8, 8)\n")
    options = ("--batch", "4x8:float32", "--mesh", "2", "--device", "cpu", "--policy", "none", "--dtype", "fp32")
    path = save(tmp_path / "run", *trained()).path
    calls += [["doctor"], ["plan", f"{tmp_path}/model.py:build", *options], ["checkpoint", "inspect", str(path)]]
    program = f"""
import os, sys
sys.modules |= dict.fromkeys({absent!r})
from composable_fsdp.cli import main
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
for call in {calls!r}:
    try:
        main(arguments=call)
    except SystemExit as end:
        assert not end.code, (call, end.code)
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    for shown in ("one process.", "fits: ", "saved by 1 rank with"):
        assert shown in done.stdout


def test_every_command_has_help_with_an_example() -> None:
    for words in COMMANDS:
        shown = run_command(*words.split(), "--help")
        assert shown.exit_code == 0
        example = f" composable-fsdp {words} " if words != "doctor" else " composable-fsdp doctor\n"
        assert example in shown.stdout, words
    for shown in (run_command("--help"), run_command()):
        assert (shown.exit_code, "Exit codes: 0 on success;" in shown.stdout) == (0, True)


def test_the_version_is_shown() -> None:
    shown = run_command("--version")
    assert (shown.exit_code, shown.stdout) == (
        0,
        f"composable-fsdp {composable_fsdp.__version__}, torch {torch.__version__}\n",
    )


WITHOUT_TORCH = """
import sys, time
from composable_fsdp.cli import main

try:
    main(arguments=sys.argv[1:])
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
print("CPU seconds:", time.process_time())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("words", ["--version", "plan --help"])
def test_the_help_and_the_version_need_no_torch_and_a_fifth_of_a_second(words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(" ")[2]) < 0.2


def test_packages_that_errors_name_can_be_installed() -> None:
    """The package itself is in no registry."""
    for path in Path(composable_fsdp.__file__).parent.rglob("*.py"):
        for told in re.findall(r"pip install ([^ \n]+)", path.read_text()):
            assert "composable" not in told, path


def test_errors_are_one_line_unless_their_tracebacks_are_asked_for(tmp_path: Path) -> None:
    arguments = ("checkpoint", "convert", tmp_path / "nothing", tmp_path / "target")
    plain = run_command(*arguments)
    assert plain.exit_code == 1
    assert plain.stderr == f"error: {tmp_path / 'nothing'} is not a checkpoint, and it does not exist.\n"
    found = run_command("--traceback", *arguments)
    assert isinstance(found.exception, composable_fsdp.FSDPError)
    assert found.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["novel"], "invalid choice: 'novel'"),
        (["checkpoint"], "the following arguments are required: COMMAND"),
        (["checkpoint", "inspect"], "the following arguments are required: path"),
        (["checkpoint", "convert"], "the following arguments are required: source, target"),
        (["timeline", "folder", "--stacks"], "timeline: error: unrecognized arguments: --stacks"),
        (["run"], "error: run needs a program, or -m and the name of a module."),
        (["run", "-m"], "error: run needs a program, or -m and the name of a module."),
        (["run", "novel.py"], "error: there is no program novel.py."),
    ],
)
def test_invalid_commands_have_exit_code_2(arguments: list[str], message: str) -> None:
    done = run_command(*arguments)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


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
    command = f"import os, runpy\nos.chdir({str(tmp_path)!r})\nrunpy.run_module('composable_fsdp', run_name='__main__')"
    done = run_program(command, "run", *flags, "--steps", "--", "3")
    assert done.stdout == "__main__ --steps -- 3 composable_fsdp._api.fsdp_module torch.distributed.fsdp\n", done.stderr


@pytest.mark.multiprocess
def test_a_program_ends_as_it_does_without_the_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nassert '--help' in sys.argv\nraise KeyError('own')\n")
    done = run_module("composable_fsdp", "run", tmp_path / "program.py", "--help")
    assert (done.returncode, "in <module>\n    raise KeyError" in done.stderr) == (1, True), done.stderr
    assert "SystemExit" not in done.stderr


UNUSED = "composable-fsdp run: this process sharded nothing. Its program did not call fully_shard of "


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("print('done')", 0, True),
        ("import sys; sys.exit(3)", 3, False),
    ],
)
def test_a_program_that_ended_well_and_sharded_nothing_says_so(tmp_path, program: str, code: int, says: bool) -> None:
    (tmp_path / "program.py").write_text(program)
    done = run_module("composable_fsdp", "run", tmp_path / "program.py")
    assert (done.returncode, UNUSED in done.stderr) == (code, says), done.stderr


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cu130", "composable_fsdp": "0.1.0"}


def test_a_launch_by_torchrun_has_no_problems() -> None:
    assert list(check_launch(LAUNCHED)) == [Finding("ok", "launch", "4 ranks, store at head:29500")]
    (alone,) = check_launch({})
    assert (alone.severity, alone.text[:12]) == ("ok", "one process.")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "first"}, "RANK=first is not a number"),
        ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE={'9' * 50} is not a number"),
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str | None], text: str) -> None:
    environment = {name: value for name, value in (LAUNCHED | change).items() if value is not None}
    told = f"{text}: torchrun --nproc-per-node N sets all of them"
    assert list(check_launch(environment)) == [Finding("error", "launch", told)]


def test_ranks_with_different_versions_are_named() -> None:
    same = list(check_versions({0: VERSIONS, 1: VERSIONS}))
    assert [each.text for each in same] == [f"{each} {version}" for each, version in VERSIONS.items()]
    found = check_versions({0: VERSIONS, 1: VERSIONS | {"torch": "9.9"}})
    text = "torch differs: 2.13.0+cu130 on rank 0, 9.9 on rank 1. Install the same everywhere"
    assert [each for each in found if each.severity != "ok"] == [Finding("error", "versions", text)]


def test_ranks_are_named_by_host_and_a_failed_all_reduce_names_its_ranks() -> None:
    hosts, problems = ("here 5a17", "there 1b2c", "here 5a17"), ("refused", "", "refused")
    notes: list[dict[str, Any]] = [
        {"rank": rank, "host": hosts[rank], "problem": "", "seconds": 2e-3 / (rank + 1)} for rank in range(3)
    ]
    assert list(check_ranks(notes)) == [
        Finding("ok", "hosts", "here: ranks 0, 2; there: rank 1"),
        Finding("ok", "all-reduce", "3 ranks over gloo, 4 MiB in 2.0 ms, 2.10 GB/s"),
    ]
    _, found = check_ranks([note | {"problem": problem} for note, problem in zip(notes, problems, strict=True)])
    assert (found.severity, found.check, found.ranks) == ("error", "all-reduce", (0, 2))
    assert found.text.startswith("failed over gloo on ranks 0, 2: refused. Set GLOO_SOCKET_IFNAME")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Done:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return run_command("doctor", *arguments, environment=environment)


def test_findings_are_shown_and_errors_set_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run(monkeypatch)
    assert (good.exit_code, "error" in good.stdout) == (0, False), good
    environment = LAUNCHED | {"RANK": "4"}
    bad = run(monkeypatch, **environment)
    assert bad.exit_code == 1
    line = next(line for line in bad.stdout.splitlines() if "RANK=4" in line)
    assert re.split("  +", line)[:3] == ["error", "launch", "all"]
    error = json.loads(run(monkeypatch, "--json", **environment).stdout)[0]
    assert (error["severity"], error["check"], error["ranks"]) == ("error", "launch", [])


def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    found = run(
        monkeypatch, "--json", "--timeout", "1", RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port
    )
    assert found.exit_code == 1
    (error,) = (each for each in json.loads(found.stdout) if each["severity"] == "error")
    assert error["text"].startswith(f"rank 1 does not reach the store at localhost:{port}: ")


def test_a_wait_of_less_than_a_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, "--timeout", "0.5")
    assert (found.exit_code, found.stderr) == (2, "error: --timeout must be at least 1 second, not 0.5.\n")
