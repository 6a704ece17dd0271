"""The test kit: answers and errors of ``run_ranks``, injected faults, and texts. Most tests start no processes."""

from __future__ import annotations

import copy
import pickle
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.testing import (
    Delay,
    Drop,
    Effect,
    Fault,
    FaultyCommunicator,
    Kill,
    Raise,
    RanksError,
    inject_faults,
)
from tests._internals import (
    Collective,
    Outcome,
    RankProcess,
    Transfer,
    format_ranks,
    function_stack,
    pickled_job,
    results_of,
    run_job,
)
from tests.helpers.cut_off_store import PartitionableStore
from tests.helpers.fake_world import FakeWorld
from tests.helpers.transports import in_place


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


def alone(*faults: Fault) -> FaultyCommunicator:
    return FaultyCommunicator(FakeWorld(1).communicator(0), faults)


def gathered(communicator: FaultyCommunicator, label: str = "all-gather") -> list[float]:
    output = torch.zeros(2)
    communicator.launch(Collective.ALL_GATHER, [Transfer(output, torch.tensor([1.0, 2.0]))], label).wait()
    return output.tolist()


def test_a_faulty_communicator_without_faults_behaves_like_its_base() -> None:
    communicator = alone()
    assert gathered(communicator, "a") == [1.0, 2.0]
    tensor = torch.tensor([3.0])
    communicator.launch(Collective.ALL_REDUCE, in_place([tensor]), "b").wait()
    assert tensor.item() == 3.0
    assert communicator.labels == ["a", "b"]
    for name in ("rank", "size", "traits"):
        assert getattr(communicator, name) == getattr(communicator.base, name)


def test_a_decorator_of_a_communicator_can_be_copied() -> None:
    communicator = alone()
    copied = copy.copy(communicator)
    assert copied == communicator
    assert gathered(copied, "a") == [1.0, 2.0]


def test_a_fault_comes_once_and_only_to_the_operation_that_it_names() -> None:
    communicator = alone(Fault(Drop(), label="layers.1", number=1))
    labels = ["layers.0", "layers.1", "layers.0", "layers.1", "layers.1"]
    assert [gathered(communicator, label)[0] for label in labels] == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_a_fault_of_another_rank_does_not_come() -> None:
    assert gathered(alone(Fault(Drop(), rank=1))) == [1.0, 2.0]
    assert gathered(alone(Fault(Drop(), rank=0))) == [0.0, 0.0]


def test_a_dropped_collective_changes_nothing() -> None:
    assert gathered(alone(Fault(Drop()))) == [0.0, 0.0]


def test_a_delayed_collective_is_correct() -> None:
    begin = time.monotonic()
    assert gathered(alone(Fault(Delay(0.05)))) == [1.0, 2.0]
    assert time.monotonic() - begin >= 0.05


def test_a_fault_raises_its_exception() -> None:
    with pytest.raises(MemoryError, match="none left"):
        gathered(alone(Fault(Raise(MemoryError("none left")))))


def test_a_signal_goes_to_this_process() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        assert gathered(alone(Fault(Kill(signal.SIGUSR2)))) == [1.0, 2.0]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert got == [signal.SIGUSR2]


def test_effects_may_be_callables_of_the_user() -> None:
    seen: list[int] = []

    def effect(launch: Any, outputs: Any) -> Any:
        seen.append(len(outputs))
        return launch()

    checked: Effect = effect
    assert gathered(alone(Fault(checked))) == [1.0, 2.0]
    assert seen == [1]


def test_only_sharded_models_have_operations() -> None:
    with pytest.raises(ConfigurationError, match=r"^inject_faults: Linear is not sharded\. Call fully_shard"):
        inject_faults(nn.Linear(2, 2)).__enter__()


def test_a_disconnected_store_times_out_until_it_is_reconnected(tmp_path: Path) -> None:
    store = PartitionableStore(dist.FileStore(str(tmp_path / "store"), 1), seconds=0.05)
    store.set("a", "1")
    clone = store.clone()
    with store.cut_off():
        for each in (store, clone, dist.PrefixStore("p", store)):
            with pytest.raises(RuntimeError, match=r"the store did not answer in 0\.05 s"):
                each.get("a")
    assert clone.get("a") == b"1"
    assert store.add("n", 2) == 2
    store.wait(["a"], timedelta(seconds=1))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0, 1, 5], "ranks 0-2, 5"),
        (range(1000), "ranks 0-999"),
        (range(0, 24, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 4 more"),
        ([*range(0, 16, 2), *range(100, 200)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 100 more"),
    ],
)
def test_ranks_are_named_by_ranges(ranks: Iterable[int], text: str) -> None:
    assert format_ranks(ranks) == text


def dump(source: str) -> str:
    """Return a dump of all threads in faulthandler's format, with the innermost frame first."""
    return f"""Thread 0x00007f97a92146c0 (most recent call first):
  File "/lib/multiprocessing/connection.py", line 395 in _recv
  File "/our/composable_fsdp/testing/ranks.py", line 60 in receive

Current thread 0x00007f97ca854b80 (most recent call first):
  File "{source}", line 3 in helper
  File "{source}", line 1 in step
  File "/our/composable_fsdp/testing/ranks.py", line 93 in run_job
  File "/our/composable_fsdp/testing/ranks.py", line 53 in main
  File "<string>", line 1 in <module>
"""


def test_a_stack_is_that_of_the_function_with_its_source_lines_and_the_innermost_last(tmp_path: Path) -> None:
    source = tmp_path / "some module.py"
    source.write_text("helper()\n\n    wait_for_ever()\n")
    assert function_stack(dump(str(source))).splitlines() == [
        f'  File "{source}", line 1, in step',
        "    helper()",
        f'  File "{source}", line 3, in helper',
        "    wait_for_ever()",
    ]


def test_a_frame_without_source_has_no_source_line() -> None:
    assert function_stack(dump("/nowhere.py")).splitlines() == [
        '  File "/nowhere.py", line 1, in step',
        '  File "/nowhere.py", line 3, in helper',
    ]


def test_a_text_without_the_function_has_no_stack() -> None:
    assert function_stack("") == ""
    assert function_stack(dump("x.py").partition("Current")[0]) == ""
