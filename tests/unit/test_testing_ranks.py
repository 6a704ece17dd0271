"""Answers of workers, and the combination of all ranks' errors into one. The tests start no processes."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

import pytest

from composable_fsdp.testing import RanksError
from tests._internals import (
    Call,
    Died,
    Job,
    Outcome,
    Raised,
    Ready,
    Returned,
    Stuck,
    _raise_failures,
    _run,
    apply_warning_filters,
    warning_filters,
)


def answer(function: Callable[..., object], *args: object) -> Returned | Raised:
    job = pickle.dumps(Job(function, args, {}, warning_filters()))
    return _run(Call(tuple(sys.path), os.getcwd(), job))


def catch_error(function: Callable[..., object], *args: object) -> Raised:
    outcome = answer(function, *args)
    assert isinstance(outcome, Raised)
    return outcome


def divide(a: int, b: int) -> float:
    return a / b


def fail_in_two_lines() -> None:
    raise ValueError("first\nsecond")


def error_of(*outcomes: Outcome) -> RanksError:
    with pytest.raises(RanksError) as error:
        _raise_failures(divide, outcomes)
    return error.value


def test_a_result_is_pickled() -> None:
    outcome = answer(divide, 6, 3)
    assert isinstance(outcome, Returned)
    assert pickle.loads(outcome.result) == 2.0
    assert not outcome.group_alive  # this process has no workers


def test_a_traceback_begins_at_the_function_and_shows_its_source() -> None:
    outcome = catch_error(divide, 1, 0)
    assert outcome.error == "ZeroDivisionError: division by zero"
    lines = outcome.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{__file__}", line ')
    assert lines[2] == "    return a / b"


def test_the_first_line_of_a_long_error_precedes_the_traceback() -> None:
    outcome = catch_error(fail_in_two_lines)
    assert outcome.error == "ValueError: first"
    assert outcome.traceback.endswith("ValueError: first\nsecond\n")


def test_exit_and_pytests_outcomes_are_failures_too() -> None:
    assert catch_error(sys.exit, 5).error == "SystemExit: 5"
    assert catch_error(pytest.fail, "enough").error == "Failed: enough"


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    assert catch_error(threading.Lock).error.startswith(
        "TypeError: The result, a lock, cannot be sent to the caller of run_ranks: cannot pickle"
    )


def test_a_module_that_the_worker_cannot_import_is_a_failure_of_the_rank() -> None:
    job = pickle.dumps(Job(divide, (), {}, ())).replace(__name__.encode(), b"x" * len(__name__))
    outcome = _run(Call(tuple(sys.path), os.getcwd(), job))
    assert isinstance(outcome, Raised)
    assert outcome.error.startswith("ModuleNotFoundError: No module named 'xxx")


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
        filters = pickle.loads(pickle.dumps(warning_filters()))
        warnings.resetwarnings()
        apply_warning_filters(filters)
        assert warning_filters() == filters
        try:
            warnings.warn("careful", UserWarning, stacklevel=1)
        except UserWarning:
            assert expected == "raised"
        else:
            assert expected == "passed"


DONE = Returned(b"", group_alive=True)


def test_ranks_that_returned_are_no_failure() -> None:
    _raise_failures(divide, [DONE, DONE])


def test_the_headline_counts_only_ranks_with_their_own_failure() -> None:
    error = error_of(Stuck(1.04, "stack"), DONE, Raised("E: x", "Traceback\nE: x\n"))
    assert str(error).splitlines() == [
        f"{__name__}.divide failed on rank 2 of 3",
        "--- rank 0: killed after 1.0 s, when it was at",
        "stack",
        "--- rank 2: raised E: x",
        "Traceback",
        "E: x",
    ]
    assert sorted(error.failures) == [0, 2]


def test_the_same_failure_on_many_ranks_is_shown_once() -> None:
    same = Raised("E: x", "Traceback")
    assert str(error_of(same, DONE, same, same)).splitlines() == [
        f"{__name__}.divide failed on ranks 0, 2-3 of 4",
        "--- ranks 0, 2-3: raised E: x",
        "Traceback",
    ]


@pytest.mark.parametrize(
    ("outcomes", "headline", "text"),
    [
        ([Stuck(60.0, "")], "did not return in time on rank 0 of 1", "killed after 60.0 s, when it was at\n(its stack"),
        ([Died(3, "")], "failed on rank 0 of 1", "ended with exit code 3"),
        ([Died(-9, "")], "failed on rank 0 of 1", "died of SIGKILL"),
        ([Died(-11, "Fatal\n")], "failed on rank 0 of 1", "died of SIGSEGV\nFatal"),
        ([Died(-99, "")], "failed on rank 0 of 1", "died of signal 99"),
        ([Died(1, ""), Ready()], "failed on rank 0 of 2", "ended with exit code 1"),
    ],
)
def test_every_kind_of_failure_has_its_message(outcomes: Sequence[Outcome], headline: str, text: str) -> None:
    error = error_of(*outcomes)
    assert str(error).startswith(f"{__name__}.divide {headline}\n--- rank 0: {text}")
