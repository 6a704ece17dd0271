"""Texts of the test kit: names of ranks, and the stack of a rank that hangs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests._internals import format_ranks, function_stack


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
