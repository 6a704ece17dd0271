"""Reports of the watchdog on ranks that block others, and its cost without faults."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import Variable

import composable_fsdp
from composable_fsdp.errors import ConfigurationError, DivergenceError, FSDPError, PeerError
from tests._internals import (
    ABANDONED,
    CONTEXT,
    RESET,
    EndOfRun,
    OperationId,
    OrderCheck,
    OrderChecker,
    RankReport,
    RunningPass,
    WarningTimes,
    Watchdog,
    diagnose,
    error_summary,
    format_ranks,
    has_died,
    has_ended,
    main_thread_line,
    order_check_from,
    process_identity,
    wait_text,
    watchdog,
)
from tests.helpers.cut_off_store import PartitionableStore
from tests.helpers.fresh_process import run_program
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.behaviour("H-03")

OWN = OperationId((0, 1, 2), 7, "all-gather of layers.2 in forward")
OTHER = OperationId((0, 1, 2), 7, "all-gather of layers.3 in forward")


def reports(**ranks: RankReport) -> dict[int, RankReport]:
    return {report.rank: report for report in ranks.values()}


WAITING = RankReport(0, 3, OWN, 1.2)


def test_reports_survive_the_store() -> None:
    for report in (
        WAITING,
        RankReport(2, last=OWN, failure="raised X", left=True),
        RankReport(1, verdict="why", diverged=True),
        RankReport(1, verdict="why", at_fault=(2, 3)),
        RankReport(1, failure=RESET, meeting=(0, 1), done=(OWN, OTHER)),
    ):
        assert RankReport.decoded(report.encoded()) == report


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
def test_ranks_are_named_by_ranges(ranks: Sequence[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_ranks_that_work_or_wait_for_the_same_operation_are_waited_for() -> None:
    assert diagnose(OWN, reports(a=WAITING, b=RankReport(1, 3, last=OWN), c=RankReport(2, 3, OWN, 0.4))) is None
    other_line = OperationId(OWN.ranks, OWN.number, "reduce-scatter of layers.3", "another group of the same ranks")
    for elsewhere in (OperationId((1, 2), 3, "all-gather of experts in forward"), other_line):
        assert diagnose(OWN, reports(a=WAITING, b=RankReport(1, 3, elsewhere, 5.0))) is None


@pytest.mark.behaviour("G-01")
def test_ranks_waiting_for_different_operations_have_diverged() -> None:
    error = diagnose(OWN, reports(a=WAITING, b=RankReport(1, 3, OTHER, 1.0)))
    assert isinstance(error, DivergenceError)
    assert str(error).startswith("Forward order differs across ranks")
    assert "rank 0: all-gather of layers.2 in forward\n  rank 1: all-gather of layers.3 in forward" in str(error)


@pytest.mark.behaviour("H-05")
def test_a_rank_that_failed_is_named_with_what_it_raised() -> None:
    failed = RankReport(2, 3, failure="raised ValueError: boom in the forward of layers.1")
    error = diagnose(OWN, reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0), c=failed))
    assert isinstance(error, PeerError)
    assert "cannot be done: rank 2 raised ValueError: boom in the forward of layers.1 (3 steps done)" in str(error)


@pytest.mark.behaviour("H-05")
@pytest.mark.parametrize("failure", [RESET, ABANDONED])
def test_a_rank_that_has_called_a_reset_comes_no_more_unless_it_has_done_its_part(failure: str) -> None:
    def found(meeting: tuple[int, ...], *done: OperationId) -> FSDPError | None:
        last = done[-1] if done else None
        reset = RankReport(1, 3, last=last, failure=failure, meeting=meeting, done=done)
        return diagnose(OWN, reports(a=WAITING, b=reset, c=RankReport(2, 3, OWN, 1.0)))

    before, other_line = replace(OWN, number=6), replace(OWN, number=9, line="another group of the same ranks")
    for done in ((), (before,), (other_line,), (before, other_line)):
        error = found((0, 1, 2), *done)
        assert isinstance(error, PeerError)
        assert f"cannot be done: rank 1 {failure} (3 steps done)" in str(error)
    assert found((0, 1, 2), OWN) is None
    assert found((0, 1, 2), OWN, other_line) is None
    assert found((1, 3)) is None  # of another model: it comes once these ranks have met


@pytest.mark.behaviour("H-05")
def test_a_rank_without_a_report_after_a_lost_connection_is_gone() -> None:
    records = reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0))
    assert "cannot be done: rank 2 is gone. Look for" in str(diagnose(OWN, records, lost="closed"))
    died = str(diagnose(OWN, records, gone={2: " (signal 9, Killed)"}))
    assert "cannot be done: rank 2 is gone (signal 9, Killed). Look for the first error in its output. Without" in died
    late = reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0), c=RankReport(2, 2))
    assert "cannot be done: rank 2 did not come to it in time." in str(diagnose(OWN, late, lost="timed out"))
    assert diagnose(OWN, late) is None
    back = reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0), c=RankReport(2, 2, OWN, 0.1))
    assert "cannot be done: rank 2 did not come to it in time." in str(diagnose(OWN, back, lost="late", timed_out=True))
    assert "cannot be done: a connection was lost." in str(diagnose(OWN, back, lost="closed"))


@pytest.mark.behaviour("H-05")
def test_the_last_operation_of_a_rank_that_is_gone_is_named() -> None:
    """It is the last operation that any rank completed with the lost rank, preferably over the same connections."""
    done = [OperationId(OWN.ranks, number, f"all-gather of layers.{number} in forward") for number in (5, 6)]
    without_it = OperationId((0, 1), 90, "all-gather of experts in forward")
    other_line = OperationId((1, 2), 80, "all-gather of norm in forward", "another group")
    records = reports(a=RankReport(0, 3, OWN, 1.2, last=done[0]), b=RankReport(1, 3, OWN, 1.0, last=done[1]))
    assert f"\n  rank 2 last took part in {done[1]}\n  closed" in str(diagnose(OWN, records, lost="closed"))
    records = reports(a=RankReport(0, 3, OWN, 1.2, last=without_it), b=RankReport(1, 3, OWN, 1.0, last=other_line))
    assert f"rank 2 last took part in {other_line}" in str(diagnose(OWN, records, lost="closed"))
    records = reports(a=RankReport(0, 3, OWN, 1.2, last=done[0]), b=RankReport(1, 3, OWN, 1.0, last=other_line))
    assert f"rank 2 last took part in {done[0]}" in str(diagnose(OWN, records, lost="closed"))


@pytest.mark.behaviour("H-05")
def test_all_ranks_raise_the_error_found_by_rank_0() -> None:
    error = diagnose(OWN, reports(a=WAITING, b=RankReport(1, verdict="Forward order differs", diverged=True)))
    assert type(error) is DivergenceError
    assert str(error) == "Forward order differs"
    assert type(diagnose(OWN, reports(b=RankReport(1, verdict="rank 2 is gone")))) is PeerError


@contextmanager
def watching(*stores: Any, ranks: int = 2) -> Iterator[list[Watchdog]]:
    """Run a watchdog for each of the first ranks, over these stores."""
    watchdogs = [Watchdog(store, rank, ranks) for rank, store in enumerate(stores)]
    try:
        yield watchdogs
    finally:
        for each in watchdogs:
            each.stop()


def test_an_unresponsive_store_does_not_block_ranks() -> None:
    store = PartitionableStore(dist.HashStore())
    with watching(*(dist.PrefixStore("watch", store) for _ in range(2))) as watchdogs:
        assert set(watchdogs[0].collect_reports([0, 1])) == {0, 1}
        begin = time.monotonic()
        with store.cut_off():
            assert set(watchdogs[0].collect_reports([0, 1])) == {0}
            with pytest.raises(PeerError, match=r"all must come, but they cannot meet: the store of the job does not"):
                watchdogs[0].meet([0, 1], "here", 1.0, "all must come")
        assert time.monotonic() - begin < 10
        assert set(watchdogs[0].collect_reports([0, 1], 10.0)) == {0, 1}


class SlowStore:
    """A store whose ``set`` takes half a second."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        time.sleep(0.5)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_ranks_rendezvous_over_a_store_slower_than_the_wait_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_STORE_SECONDS", 0.1)
    store = dist.HashStore()
    with watching(*(SlowStore(store) for _ in range(2))) as watchdogs:
        calls = [partial(each.meet, [0, 1], f"of {each.rank}", 30.0, "all must come") for each in watchdogs]
        assert run_in_threads(calls, 5e-3) == [{"of 0": [0], "of 1": [1]}] * 2


class UnreliableStore:
    """A store whose next ``failures`` operations fail."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise dist.DistNetworkError("no route to host")
        return getattr(self._store, name)


@pytest.mark.parametrize("failures", [2, 30])
def test_a_temporary_store_failure_is_retried(failures: int) -> None:
    store = UnreliableStore(dist.HashStore())
    with watching(store, store._store) as watchdogs:
        store.failures = failures
        time.sleep(1.2)
        answers = set(watchdogs[1].collect_reports([0, 1], 1.0))
        assert answers == ({0, 1} if failures == 2 else {1})


@pytest.fixture
def first_warning() -> Iterator[Callable[[float | None], None]]:
    yield composable_fsdp.set_wait_warning
    composable_fsdp.set_wait_warning(30.0)


@pytest.mark.behaviour("H-07")
def test_a_wait_is_warned_of_after_the_set_time_and_then_at_growing_intervals(first_warning) -> None:
    times = WarningTimes()
    assert [second for second in range(400) if times.is_due("all-gather", second)] == [30, 60, 120, 240]
    assert [second for second in range(40) if times.is_due("another", second)] == [30]
    first_warning(2.5)
    assert [second for second in range(20) if times.is_due("a third", second)] == [3, 6, 12]
    times.latest = 2.0
    assert [second for second in range(20) if times.is_due("a fourth", second)] == [2, 4, 8, 16]
    first_warning(None)
    assert not times.is_due("a fifth", 1e6)


@pytest.mark.behaviour("H-07")
def test_a_rank_that_meets_others_warns_of_those_that_are_late(first_warning, caplog) -> None:
    first_warning(0.2)
    store = dist.HashStore()
    with watching(store, store) as pair:
        late = threading.Timer(1.0, lambda: pair[1].meet([0, 1], "here", 30.0, "all must come"))
        late.start()
        pair[0].meet([0, 1], "here", 30.0, "all must come")
        late.join()
    assert re.match(
        r"all must come: waiting for rank 1, for \d+\.\d s so far and up to 30 s\.\n  rank 1 is at work \(",
        caplog.messages[0],
    )


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "30"])
def test_a_warning_after_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"takes a positive number of seconds or None, not {seconds!r}\.$"):
        composable_fsdp.set_wait_warning(seconds)


@pytest.mark.behaviour("H-07")
def test_the_first_rank_that_waits_names_the_others() -> None:
    late = RankReport(2, 3, last=OTHER, place="train.py:9 in main: dist.barrier()")
    two = reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0), c=late)
    assert wait_text(0, OWN, 31.0, two) == (
        "rank 0 has waited 31.0 s for rank 2 in all-gather of layers.2 in forward (operation 7 of ranks [0, 1, 2]).\n"
        "  rank 2 is at work since all-gather of layers.3 in forward (operation 7 of ranks [0, 1, 2]) (3 steps done), "
        "and executes train.py:9 in main: dist.barrier()"
    )
    assert wait_text(1, OWN, 31.0, two) == ""
    stopped = wait_text(0, OWN, 31.0, reports(a=WAITING))
    assert "for ranks 1-2 in all-gather" in stopped
    assert "\n  rank 2 does not answer: its process is gone or stopped" in stopped
    assert "31.0 s for data, with all other ranks of it, in" in wait_text(
        0, OWN, 31.0, reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0), c=RankReport(2, 3, OWN, 1.0))
    )


def test_the_line_of_the_program_is_found_below_calls_of_libraries() -> None:
    found: list[str] = []
    items = torch.utils.data.default_collate  # a function of torch

    class Item(dict[str, int]):
        def __getitem__(self, key: str) -> int:  # below it: the functions that read the stack
            found.append(main_thread_line())
            return super().__getitem__(key)

    items([Item(a=1), Item(a=2)])
    assert found[0].endswith("in __getitem__: found.append(main_thread_line())"), found


READ_STACKS = """
import ctypes, gc, os, sys, threading, time
from tests._internals import main_thread_line

enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: 0)
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()

class Garbage:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        time.sleep(0)  # another thread runs

def recurse(depth):
    garbage = Garbage()
    return recurse(depth - 1) if depth else sum(each for each in range(9))

def read():
    end, number = time.monotonic() + 1.5, 0
    while time.monotonic() < end or not number:  # beside other load, a read may take seconds
        main_thread_line()
        number += 1
    os._exit(0)

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
threading.Thread(target=read).start()
while True:
    recurse(50)
    if not libc.pthread_create(ctypes.byref(thread), None, enter, None):
        libc.pthread_join(thread, None)
"""


def test_stacks_can_be_read_while_threads_enter_python_and_garbage_is_collected() -> None:
    result = run_program(READ_STACKS)
    assert result.returncode == 0, result.stderr


def test_an_interrupt_that_the_user_handles_ends_no_wait() -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    try:
        watchdog.listen()
        signal.raise_signal(signal.SIGINT)
        assert not watchdog.arrived()
        watchdog.stop_listening()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handled == [signal.SIGINT]


@pytest.mark.parametrize("handled", [False, True])
def test_an_interrupt_is_seen_once_and_only_by_the_wait_in_which_it_came(handled: bool) -> None:
    watchdog.listen()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    if handled:
        watchdog.stop_listening()
        watchdog.listen()
    try:
        assert watchdog.arrived() is not handled
        assert not watchdog.arrived()
    finally:
        watchdog.stop_listening()


def test_a_wait_leaves_the_file_descriptor_of_another_library_alone() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        watchdog.listen()
        watchdog.stop_listening()
        assert signal.set_wakeup_fd(before) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


BUSY_TO_THE_END = """
import torch.distributed as dist
from tests._internals import watchdog

watchdog._PERIOD = 0.0
store = dist.TCPStore("localhost", 0, 1, True)
watchdogs = [watchdog.Watchdog(dist.PrefixStore(str(i), store.clone()), 0, 2) for i in range(16)]
watchdogs[0].stop()
print(sorted(watchdogs[1].collect_reports([0])))
"""


@pytest.mark.multiprocess
def test_store_threads_have_ended_when_python_exits() -> None:
    """Otherwise C++ aborts the process with SIGABRT. Many threads run so that some are always inside the store."""
    done = run_program(BUSY_TO_THE_END)
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr


def fail(*_: object) -> None:
    raise ArithmeticError("test failure")


def report_to(running: RunningPass, end: Callable[[], object]) -> None:
    """Let autograd tell ``running`` of the end of its run, and call ``end`` if it succeeds."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(EndOfRun(running, lambda: running.module))
    engine.queue_callback(end)


def backward_of(running: RunningPass, end: Callable[[], object], *, fails: bool) -> None:
    """Run a backward with the pass ``running``, in a graph whose last gradient may raise."""
    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    middle.register_hook(lambda _: report_to(running, end))
    if fails:
        x.register_hook(fail)
    middle.sum().backward()


@pytest.mark.behaviour("H-01")
@pytest.mark.parametrize("fails", [True, False], ids=["in a gradient", "in the callback"])
def test_a_backward_that_raised_is_left_before_its_exception_is_caught(fails: bool) -> None:
    running = RunningPass("backward", "root")
    records: list[str] = []
    with pytest.raises(ArithmeticError) as caught:  # keeps the traceback and all of its frames
        backward_of(running, lambda: records.append(running.left) if fails else fail(), fails=fails)
    assert running.left == "raised in the backward of root"
    assert caught.value is not None
    assert not records


@pytest.mark.behaviour("H-01")
def test_a_backward_runs_while_others_begin_and_fail_inside_it() -> None:
    outer, inner = RunningPass("backward", "outer"), RunningPass("backward", "inner")
    records: list[str] = []

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad(), pytest.raises(ArithmeticError):
                backward_of(inner, records.clear, fails=True)
            records.extend([outer.left, inner.left])
            return gradient

    x = torch.ones(2, requires_grad=True)
    out: torch.Tensor = cast(Any, Reentrant).apply(x) * 2
    out.register_hook(lambda _: report_to(outer, lambda: records.append(outer.left)))
    out.sum().backward()
    assert records == ["", "raised in the backward of inner", ""]


@pytest.mark.behaviour("H-01", "H-06")
def test_a_forward_has_ended_once_its_frame_ended_even_if_the_frame_is_referenced() -> None:
    passes: list[RunningPass] = []
    begun, interrupt_it = threading.Event(), threading.Event()
    kept: list[BaseException] = []

    def forward() -> None:
        passes.append(RunningPass("forward", "root", sys._getframe()))
        begun.set()
        interrupt_it.wait()
        raise KeyboardInterrupt

    def train() -> None:
        try:
            forward()
        except KeyboardInterrupt as error:
            kept.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    assert passes[0].left == ""
    interrupt_it.set()
    thread.join()
    assert passes[0].left == "was interrupted in the forward of root"
    assert kept[0].__traceback__ is not None


def test_checking_a_suspended_coroutine_does_not_close_it() -> None:
    def client() -> Iterator[int]:
        yield 1
        yield 2

    suspended: Any = client()
    assert next(suspended) == 1
    assert not has_ended(suspended.gi_frame)
    assert next(suspended) == 2


def test_nothing_is_collected_while_stacks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    current = sys._current_frames

    def noting() -> dict[int, Any]:
        collects.append(gc.isenabled())
        return current()

    monkeypatch.setattr(sys, "_current_frames", noting)
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            assert main_thread_line()
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()
    assert collects == [False, False]


class Ranks:
    """Runs all ranks of a group in turn, up to the first wait for other ranks."""

    def __init__(self, size: int, level: OrderCheck) -> None:
        self.asked: list[int] = []
        self.exchanged: Sequence[int] = ()
        self.agreements = [OrderChecker(self._exchange, self._tell, level) for _ in range(size)]

    def _exchange(self, own: int) -> Sequence[int]:
        self.asked.append(own)
        return self.exchanged or [own]

    def _tell(self, own: str) -> Mapping[int, str]:
        return {0: own, 1: "something else"}

    def begin(self, operation: str) -> int:
        before = len(self.asked)
        for agreement in self.agreements:
            agreement.begin(operation, (4,))
        return len(self.asked) - before


@given(st.permutations("abcdefghijk"), st.integers(1, CONTEXT - 1))
@pytest.mark.behaviour("G-04")
def test_a_sequence_that_repeats_is_not_compared_again(operations: list[str], times: int) -> None:
    ranks = Ranks(2, OrderCheck.FIRST)
    operations = [operations[0]] * times + operations[1:]  # like a group whose gradients need several messages
    for operation in [*operations, *operations[:CONTEXT]]:
        assert ranks.begin(operation) == 2
    assert sum(map(ranks.begin, [*operations[CONTEXT:], *operations])) == 0


@pytest.mark.behaviour("G-01")
def test_a_new_sequence_is_compared_between_ranks() -> None:
    ranks = Ranks(1, OrderCheck.FIRST)
    for operation in "ab" * CONTEXT:
        ranks.begin(operation)
    ranks.exchanged = [1, 2]
    ranks.begin("a")  # a known sequence, so ranks do not compare
    with pytest.raises(DivergenceError, match=r"rank 0: c \(4 bytes in 1 tensors, \w{4}\)\n  rank 1: something else"):
        ranks.begin("c")


@pytest.mark.behaviour("G-01")
def test_levels_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "COMPOSABLE_FSDP_ORDER_CHECK"
    monkeypatch.setenv(variable, "always")
    assert order_check_from() is OrderCheck.ALWAYS
    assert order_check_from("off") is OrderCheck.OFF
    monkeypatch.setenv(variable, "never")
    levels = "'off', 'first', 'always', not 'never'"
    with pytest.raises(ConfigurationError, match=f"^the environment variable {variable} is one of {levels}"):
        order_check_from()


# Processes of other ranks


@pytest.fixture
def watchdogs() -> Iterator[Callable[[dist.Store], Watchdog]]:
    begun: list[Watchdog] = []
    yield lambda store: (begun.append(Watchdog(store, 0, 2)), begun[-1])[1]  # type: ignore[func-returns-value]
    for each in begun:
        each.stop()
        each.join(5.0)


def test_a_process_of_this_host_is_known_to_have_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        identity = f"{process_identity().rsplit(' ', 2)[0]} {process.pid} {start}"
        assert not has_died(identity)
        process.kill()
        while not has_died(identity):
            time.sleep(0.01)
    assert has_died(identity)
    for alive in (process_identity(), "", f"another-boot 1 {os.getpid()} 1"):
        assert not has_died(alive)


def test_a_process_has_an_identity_though_its_name_was_cut_within_a_character() -> None:
    name = Path("/proc/self/comm")
    before, identity = name.read_bytes(), process_identity()
    try:
        name.write_bytes("тренировка".encode()[:15])
        assert process_identity() == identity
        assert not has_died(identity)
    finally:
        name.write_bytes(before.strip())


def test_the_summary_of_an_error_includes_the_exception_of_another_process() -> None:
    inner = (
        "Traceback (most recent call last):\n  File 'a.py'\n    x\nKeyError: 'first'\n\nDuring handling, another:\n\n"
    )
    text = (
        f"Caught OSError in a worker.\nOriginal {inner}Traceback (most recent call last):\n  File\nOSError: the cause\n"
    )
    assert error_summary(OSError(text)) == "OSError: Caught OSError in a worker. OSError: the cause"
    assert error_summary(OSError("first\nsecond")) == "OSError: first"
    assert error_summary(OSError("no\nTraceback (most recent call last)")) == "OSError: no"
    assert error_summary(OSError()) == "OSError"


@pytest.mark.behaviour("H-05")
def test_the_last_report_of_a_process_that_has_ended_is_read(watchdogs: Callable[[dist.Store], Watchdog]) -> None:
    store = dist.HashStore()
    failed = Watchdog(store, 1, 2)
    failed.fail("raised X in the forward of layers.1")
    failed.stop()
    failed.join(60.0)
    with subprocess.Popen(["true"]) as process:
        process.wait()
        answered, report = store.get("report/1").decode().split("\n", 1)
        gone = replace(RankReport.decoded(report), process=f"{process_identity().rsplit(' ', 2)[0]} {process.pid} 1")
        store.set("report/1", f"{answered}\n{gone.encoded()}")
        assert watchdogs(store).collect_reports([0, 1])[1].failure == "raised X in the forward of layers.1"


def test_an_error_has_the_ranks_at_fault() -> None:
    """Also if another rank has found them."""
    others = reports(a=WAITING, b=RankReport(1, 3, OWN, 1.0))
    failed = others | reports(c=RankReport(2, 3, failure="raised X"))
    late = others | reports(c=RankReport(2, 2))
    verdict = others | reports(c=RankReport(2, verdict="rank 3 is gone", at_fault=(3,)))
    assert _at_fault(diagnose(OWN, failed)) == (2,)
    assert _at_fault(diagnose(OWN, others, lost="closed")) == (2,)
    assert _at_fault(diagnose(OWN, late, lost="late", timed_out=True)) == (2,)
    assert _at_fault(diagnose(OWN, verdict)) == (3,)


def _at_fault(error: Exception | None) -> tuple[int, ...]:
    assert isinstance(error, PeerError)
    assert pickle.loads(pickle.dumps(error)).ranks == error.ranks
    return error.ranks
