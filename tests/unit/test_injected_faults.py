"""What tests of faults use: failures of ``run_ranks`` as text, injected faults, and a store that is cut off."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from tests._internals import Collective, Transfer, format_ranks
from tests.helpers.fake_world import FakeWorld
from tests.helpers.injected_faults import Drop, Fault, FaultyCommunicator, Raise
from tests.helpers.rank_process import Outcome, RanksError, function_stack, results_of


def error_of(*outcomes: Outcome) -> RanksError:
    with pytest.raises(RanksError) as error:
        results_of(error_of, outcomes)
    return error.value


DONE = Outcome(pickle.dumps(2.0))


def test_the_headline_counts_ranks_with_their_own_failure_and_equal_ones_are_shown_once() -> None:
    stuck = Outcome(failure="killed after 1.0 s, when it was at\nstack", is_stuck=True)
    same = Outcome(failure="raised E: x\nTraceback\nE: x")
    error = error_of(stuck, DONE, same, same)
    assert str(error).splitlines() == [
        f"{__name__}.error_of failed on ranks 2-3 of 4",
        "--- rank 0: killed after 1.0 s, when it was at",
        "stack",
        "--- ranks 2-3: raised E: x",
        "Traceback",
        "E: x",
    ]
    assert sorted(error.failures) == [0, 2, 3]
    assert str(error_of(stuck, DONE)).startswith(f"{__name__}.error_of did not return in time on rank 0 of 2\n")


def alone(*faults: Fault) -> FaultyCommunicator:
    return FaultyCommunicator(FakeWorld(1).communicator(0), faults)


def gathered(communicator: FaultyCommunicator, label: str = "all-gather") -> list[float]:
    output = torch.zeros(2)
    communicator.launch(Collective.ALL_GATHER, [Transfer(output, torch.tensor([1.0, 2.0]))], label).wait()
    return output.tolist()


def test_a_decorator_of_a_communicator_can_be_copied() -> None:
    communicator = alone()
    copied = copy.copy(communicator)
    assert copied == communicator
    assert gathered(copied, "a") == [1.0, 2.0]
    assert communicator.labels == ["a"]
    for name in ("rank", "size", "traits"):
        assert getattr(communicator, name) == getattr(communicator.base, name)


def test_a_fault_comes_once_to_the_operation_and_rank_that_it_names() -> None:
    communicator = alone(Fault(Drop(), label="layers.1", number=1))
    labels: Sequence[str] = ["layers.0", "layers.1", "layers.0", "layers.1", "layers.1"]
    assert [gathered(communicator, label)[0] for label in labels] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert gathered(alone(Fault(Drop(), rank=1))) == [1.0, 2.0]
    with pytest.raises(MemoryError, match="none left"):
        gathered(alone(Fault(Raise(MemoryError("none left")))))


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


def test_a_stack_is_that_of_the_function_with_its_source_lines_and_the_innermost_last(tmp_path: Path) -> None:
    source = tmp_path / "some module.py"
    source.write_text("helper()\n\n    wait_for_ever()\n")
    dump = f"""Thread 0x00007f97a92146c0 (most recent call first):
  File "/lib/multiprocessing/connection.py", line 395 in _recv
  File "/our/tests/helpers/rank_process.py", line 60 in receive

Current thread 0x00007f97ca854b80 (most recent call first):
  File "{source}", line 3 in helper
  File "{source}", line 1 in step
  File "/our/tests/helpers/rank_process.py", line 93 in run_job
  File "/our/tests/helpers/rank_process.py", line 53 in main
  File "<string>", line 1 in <module>
"""
    assert function_stack(dump).splitlines() == [
        f'  File "{source}", line 1, in step',
        "    helper()",
        f'  File "{source}", line 3, in helper',
        "    wait_for_ever()",
    ]
    assert function_stack(dump.partition("Current")[0]) == ""
