"""Programs in fresh processes behave like programs that Python starts."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.helpers.fresh_process import Program, run_program, run_script_on_ranks

pytestmark = pytest.mark.multiprocess


def test_exceptions_exits_and_signals_give_pythons_exit_codes() -> None:
    failed = run_program("1 / 0")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    ended = run_program("import sys; sys.exit('reason')")
    assert (ended.returncode, ended.stderr) == (1, "reason\n")
    killed = run_program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL


RANKS = """
import os, sys, time
import torch.distributed as dist
if sys.argv[1:] == ["raise"]:
    if os.environ["RANK"] == "1":
        raise ArithmeticError("test failure")
    time.sleep(600)
dist.init_process_group("gloo")
seen = [None, None]
dist.all_gather_object(seen, os.environ["LOCAL_RANK"])
os.write(1, f"{__name__} {sys.argv[1:]} {__file__} {seen}\\n".encode())  # both ranks write to one file
"""


def test_a_rank_that_fails_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"ArithmeticError: test failure"):
        run_script_on_ranks(script, "raise")
    assert time.monotonic() - begin < 150
    with pytest.raises(AssertionError):
        run_script_on_ranks(script, "raise", ranks=1, timeout=0.5)


def test_a_module_runs_until_a_signal_or_its_end(tmp_path: Path) -> None:
    outputs = tmp_path / "stdout", tmp_path / "stderr"
    no_ranks = {"RANK": "0", "WORLD_SIZE": "0"}
    program = Program("tests.helpers.failing_rank", "none", outputs=outputs, environment=no_ranks)
    assert program.wait() == program.wait() == 1
    assert "ValueError" in outputs[1].read_text()
    server = Program("http.server", "0", outputs=outputs, environment={})
    server.send_signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    server.send_signal(signal.SIGKILL)  # it is known to have ended
