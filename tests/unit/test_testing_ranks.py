"""Answers of the ranks of ``run_ranks``, and the combination of all errors into one. The tests start no processes."""

from __future__ import annotations

import pickle
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path

import pytest

from composable_fsdp.testing import RanksError
from tests._internals import Outcome, RankProcess, pickled_job, results_of, run_job


def answer(function: Callable[..., object], *args: object) -> Outcome:
    return run_job(pickle.dumps((function, args, {}, list(warnings.filters))))


def failure_lines(function: Callable[..., object], *args: object) -> list[str]:
    outcome = answer(function, *args)
    assert outcome.result == b""
    return outcome.failure.splitlines()


def divide(a: int, b: int) -> float:
    return a / b


def fail_in_two_lines() -> None:
    raise ValueError("first\nsecond")


def warn() -> str:
    try:
        warnings.warn("careful", UserWarning, stacklevel=1)
    except UserWarning:
        return "raised"
    return "passed"


def error_of(*outcomes: Outcome) -> RanksError:
    with pytest.raises(RanksError) as error:
        results_of(divide, outcomes)
    return error.value


def test_a_traceback_begins_at_the_function_and_shows_its_source() -> None:
    lines = failure_lines(divide, 1, 0)
    assert lines[:2] == ["raised ZeroDivisionError: division by zero", "Traceback (most recent call last):"]
    assert lines[2].startswith(f'  File "{__file__}", line ')
    assert lines[3] == "    return a / b"


def test_the_first_line_of_a_long_error_precedes_the_traceback() -> None:
    lines = failure_lines(fail_in_two_lines)
    assert lines[0] == "raised ValueError: first"
    assert lines[-2:] == ["ValueError: first", "second"]


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    assert failure_lines(threading.Lock)[0].startswith(
        "raised TypeError: The result, a lock, cannot be sent to the caller of run_ranks: cannot pickle"
    )


@pytest.mark.parametrize(
    ("action", "message", "module", "expected"),
    [
        ("error", "", "", "raised"),
        ("error", "care", "", "raised"),
        ("error", "other", "", "passed"),
        ("error", "", __name__, "raised"),
        ("error", "", "other", "passed"),
        ("ignore", "", "", "passed"),
    ],
)
def test_warning_filters_are_sent_to_ranks(action: str, message: str, module: str, expected: str) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.filterwarnings(action, message, UserWarning, module)  # type: ignore[arg-type]  # a literal to mypy
        job = pickled_job(warn, 1, (), {})
        warnings.resetwarnings()
        before = list(warnings.filters)
        assert pickle.loads(run_job(job).result) == expected
        assert list(warnings.filters) == before


DONE = Outcome(pickle.dumps(2.0))


def test_failures_of_lost_ranks_are_no_failure_and_they_have_no_result() -> None:
    assert results_of(divide, [DONE, Outcome(failure="died of SIGKILL"), DONE], lost=[1, 2]) == [2.0]
    with pytest.raises(RanksError, match="divide failed on rank 0 of 2"):
        results_of(divide, [Outcome(failure="died of SIGKILL"), DONE], lost=[1])


def test_the_headline_counts_only_ranks_with_their_own_failure() -> None:
    stuck = Outcome(failure="killed after 1.0 s, when it was at\nstack", is_stuck=True)
    error = error_of(stuck, DONE, Outcome(failure="raised E: x\nTraceback\nE: x"))
    assert str(error).splitlines() == [
        f"{__name__}.divide failed on rank 2 of 3",
        "--- rank 0: killed after 1.0 s, when it was at",
        "stack",
        "--- rank 2: raised E: x",
        "Traceback",
        "E: x",
    ]
    assert sorted(error.failures) == [0, 2]
    assert str(error_of(stuck, DONE)).startswith(
        f"{__name__}.divide did not return in time on rank 0 of 2\n--- rank 0: k"
    )


def test_the_same_failure_on_many_ranks_is_shown_once() -> None:
    same = Outcome(failure="raised E: x\nTraceback")
    assert str(error_of(same, DONE, same, same)).splitlines() == [
        f"{__name__}.divide failed on ranks 0, 2-3 of 4",
        "--- ranks 0, 2-3: raised E: x",
        "Traceback",
    ]


@pytest.mark.parametrize(
    ("program", "stacks", "text"),
    [
        (["false"], "", "ended with exit code 1"),
        (["sh", "-c", f"kill -{signal.SIGKILL:d} $$"], "", "died of SIGKILL"),
        (["sh", "-c", f"kill -{signal.SIGTERM:d} $$"], "Fatal\n", "died of SIGTERM\nFatal"),
        (["sh", "-c", f"kill -{signal.SIGRTMIN + 1:d} $$"], "", f"died of signal {signal.SIGRTMIN + 1:d}"),
    ],
)
def test_every_end_of_a_process_has_its_message(program: Sequence[str], stacks: str, text: str, tmp_path: Path) -> None:
    connection, theirs = Pipe()
    theirs.close()
    (tmp_path / "stacks").write_text(stacks)
    process = subprocess.Popen(program, start_new_session=True)
    process.wait(20)
    assert RankProcess(process, connection, tmp_path / "stacks").answer() == Outcome(failure=text)
    assert connection.closed
