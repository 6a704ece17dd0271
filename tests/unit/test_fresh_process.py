"""Programs in fresh processes behave like programs that Python starts."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.fresh_process import run_module, run_program

pytestmark = pytest.mark.multiprocess


def test_a_program_has_arguments_and_its_own_output_and_exit_functions() -> None:
    program = "import atexit, sys; atexit.register(print, 'end'); print(__name__, sys.argv); sys.stderr.write('warn')"
    done = run_program(program, "a", "b c")
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ ['-c', 'a', 'b c']\nend\n", "warn")


def test_exceptions_exits_and_signals_give_pythons_exit_codes() -> None:
    failed = run_program("1 / 0")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    ended = run_program("import sys; sys.exit('reason')")
    assert (ended.returncode, ended.stderr) == (1, "reason\n")
    killed = run_program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL


def test_a_program_begins_without_this_library_and_without_changes_of_earlier_programs() -> None:
    program = "import sys; print(hasattr(sys, 'mark'), 'composable_fsdp' in sys.modules)\nsys.mark = 1"
    for _ in range(2):
        assert run_program(f"{program}\nimport composable_fsdp").stdout == "False False\n"


def test_a_module_runs_as_the_main_module() -> None:
    done = run_module("json.tool", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
