"""Runs drawn programs on both spines, and compares results bit by bit and events line by line.

The old schedule assumes what is in memory when an event comes, and the new spine asks. So the old one is made to ask
here, by the changes of :func:`asking`; ``--assuming`` leaves it as it is.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from composable_fsdp.testing import RanksError
from tests._internals import FSDPState, Pass, RootOptions, ScheduleRunner, groups_state, lazy_init, passes
from tests.goldens.cases import QUICK, known_programs
from tests.goldens.dry_runs import observe_dry_runs
from tests.goldens.observe import PORTABLE, Observer
from tests.helpers.fuzz.programs import LIST, Program, groups, node_infos
from tests.helpers.fuzz.reference import Meshes, train
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import TRANSPORTS

__all__ = ["KINDS", "compare_dry_runs", "compare_spines"]

BATCH = 50
"""The number of programs in one call of ``run_ranks``."""


def _steps(test: Callable[[Any], object]) -> Callable[[Program], bool]:
    return lambda program: any(test(step) for step in program.steps)


def _nodes(test: Callable[[Any], object]) -> Callable[[Program], bool]:
    return lambda program: any(test(info) for info in node_infos(program.tree))


KINDS: Mapping[str, Callable[[Program], bool]] = {
    "accumulation": _steps(lambda step: step.hold != "none" or len(step.backwards) > 1),
    "checkpoint": _nodes(lambda info: getattr(info.node, "kind", "") == "checkpoint"),
    "reentrant checkpoint": _nodes(lambda info: getattr(info.node, "kind", "") == "reentrant checkpoint"),
    "no grad": _steps(lambda step: step.evaluate or step.generate),
    "lists": lambda program: any(path[-1:] == (LIST,) for path in groups(program.tree)),
    "ties": _nodes(lambda info: getattr(info.node, "borrows", False)),
    "several roots": lambda p: len({info.root for info in node_infos(p.tree) if info.root is not None}) > 1,
    "hybrid": lambda program: len(program.mesh) > 1,
    "tensor parallel": lambda program: program.tensor_ranks > 1,
    "failing": _steps(lambda step: step.fails != "never"),
    "codecs": lambda program: program.feedback,
    "threads": lambda program: program.beside is not None,
}
"""The kinds of programs; one that is of none is plain."""


@dataclass(frozen=True)
class Seen:
    """The observation of a program by one rank: a line per event, with labels, and a line per result; or an error."""

    events: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    error: str = ""


@dataclass
class Comparison:
    """The numbers of programs by kind: all, and those with equal results and with equal events."""

    all: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    different: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, program: Program, old: Sequence[Seen], new: Sequence[Seen]) -> None:
        kinds = [kind for kind, is_of in KINDS.items() if is_of(program)] or ["plain"]
        same_results = [seen.results for seen in old] == [seen.results for seen in new]
        same_events = [seen.events for seen in old] == [seen.events for seen in new]
        for kind in (*kinds, "in all"):
            self.all[kind] += 1
            self.results[kind] += same_results
            self.events[kind] += same_events
        if not same_results or not same_events:
            rank = next(r for r in range(len(old)) if old[r] != new[r])
            what = "events" if same_results else "results"
            self.different[name] = (
                f"{what} differ ({', '.join(kinds)}), rank {rank}\n{_difference(old[rank], new[rank])}"
            )


def _difference(old: Seen, new: Seen) -> str:
    if old.error or new.error:
        return f"old: {old.error or 'succeeded'}\nnew: {new.error or 'succeeded'}"
    before, after = (old.events, new.events) if old.events != new.events else (old.results, new.results)
    return "\n".join(list(difflib.unified_diff(before, after, "old", "new", lineterm="", n=4))[:40])


def compare_spines(
    *,
    quick: bool,
    only: Collection[str] = (),
    transports: Collection[str] = tuple(TRANSPORTS),
    assuming: bool = False,
    unfused: bool = False,
    kind: str = "",
) -> int:
    """Compare the spines, and print the numbers by kind and the differences. Return 1 if there are any."""
    programs = known_programs()
    if only:
        programs = {name: programs[name] for name in only}
    elif quick:
        programs = {name: program for name, program in programs.items() if int(name) % QUICK == 0}
    if kind:
        programs = {name: program for name, program in programs.items() if KINDS[kind](program)}
    found = 0
    for transport in transports:
        begin, comparison = time.monotonic(), Comparison()
        for ranks in sorted({program.world_size for program in programs.values()}):
            names = [name for name, program in programs.items() if program.world_size == ranks]
            for start in range(0, len(names), BATCH):
                batch = {name: programs[name] for name in names[start : start + BATCH]}
                fusion = ", unfused" if unfused else ""
                old = _run(batch, f"{'old' if assuming else 'old, asking'}{fusion}", transport)
                new = _run(batch, f"new{fusion}", transport)
                for name, program in batch.items():
                    comparison.add(name, program, old[name], new[name])
        for name, text in comparison.different.items():
            _say(f"== {name}, {transport}: {text}")
        _say(f"{transport}, {time.monotonic() - begin:.0f} s: programs, equal results, equal events")
        for each, number in comparison.all.items():
            _say(f"  {each:<22}{number:>5}{comparison.results[each]:>6}{comparison.events[each]:>6}")
        found += len(comparison.different)
    return 1 if found else 0


def compare_dry_runs(
    *, quick: bool, only: Collection[str] = (), transports: Collection[str] = tuple(TRANSPORTS)
) -> int:
    """Compare each pass of the new spine with its dry run. Return 1 if any differs."""
    programs = known_programs()
    chosen = {n: p for n, p in programs.items() if (n in only if only else not quick or int(n) % QUICK == 0)}
    different = 0
    for transport in transports:
        kinds: Counter[str] = Counter()
        for ranks in sorted({program.world_size for program in chosen.values()}):
            names = [name for name, program in chosen.items() if program.world_size == ranks]
            for start in range(0, len(names), BATCH):
                batch = names[start : start + BATCH]
                environment = {**TRANSPORTS[transport], **PORTABLE}
                seen = run_ranks(
                    observe_dry_runs, ranks, [chosen[n] for n in batch], timeout=600.0, environment=environment
                )
                for name, lines in zip(batch, zip(*seen, strict=True), strict=True):
                    line = next((each for each in lines if each.startswith("differs")), lines[0])
                    kind, _, rest = line.partition(":")
                    kinds[line if kind == "left out" else kind] += 1
                    for word in rest.split(", ") if kind == "equal" else ():
                        number, of = word.split()
                        kinds[of] += int(number)
                    if kind == "differs":
                        different += 1
                        _say(f"== {name}, {transport}: {line}")
        _say(f"{transport}: {', '.join(f'{kind} {number}' for kind, number in kinds.items())}")
    return 1 if different else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _run(programs: Mapping[str, Program], spine: str, transport: str) -> dict[str, list[Seen]]:
    """Run programs in one call. If it dies or hangs, run each half, until only one program fails."""
    names, environment = list(programs), {**TRANSPORTS[transport], **PORTABLE}
    ranks = next(iter(programs.values())).world_size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            timeout = 60.0 + 3.0 * len(names)
            seen = run_ranks(
                observe_spine, ranks, list(programs.values()), spine, timeout=timeout, environment=environment
            )
    except RanksError as error:
        if len(names) == 1:
            return {names[0]: [Seen(error=str(error))] * ranks}
        middle = len(names) // 2
        parts = names[:middle], names[middle:]
        return {n: s for part in parts for n, s in _run({n: programs[n] for n in part}, spine, transport).items()}
    return {name: list(each) for name, each in zip(names, zip(*seen, strict=True), strict=True)}


# -- on the ranks


def observe_spine(programs: Sequence[Program], spine: str) -> list[Seen]:
    """Train the programs one after the other on ``spine``: "old", "old, asking" or "new", with ", unfused" or not."""
    name, *changes = spine.split(", ")
    meshes: Meshes = {}
    found = []
    unfused = mock.patch.object(groups_state, "RootOptions", partial(RootOptions, max_fused_bytes=0))
    with (
        mock.patch.object(lazy_init, "_spine", name),
        asking() if "asking" in changes else nullcontext(),
        unfused if "unfused" in changes else nullcontext(),
    ):
        for program in programs:
            with Observer() as observer:
                for run in train(program, meshes):
                    if run.error:  # of a thread
                        raise RuntimeError(run.error)
                    for (label, _), value in zip(run.labels, run.values, strict=True):
                        observer.note(label, value)
            seen = observer.observation()
            labels = iter(seen.labels)
            lines = [f"{e}: {next(labels)}" if e.startswith("collective:") else e for e in seen.events]
            found.append(Seen(tuple(lines), seen.results))
    return found


@contextmanager
def asking() -> Iterator[None]:
    """Make the old spine ask at run time what is in memory.

    A group that is missing is gathered first, then prefetches are launched, also of groups that the schedule expects
    in memory; where nothing was missing, waits precede prefetches as the schedule says. What is in flight at the end of
    a backward, and stays, is waited for.
    """

    def perform(runner: Any, row: Any) -> None:
        is_late = runner.streams.device.has_streams and not row.waits_first
        for group, (act, target) in row.waits:
            if not group.is_gathered:
                act(runner, target)
                is_late = True
        if not is_late:
            for group, _ in row.waits:
                group.wait()
        for act, target in row.gathers:
            groups = target[1][1][0] if act is ScheduleRunner._gather_if_it_fits else target[0]
            if isinstance(groups, list) and not groups[0].is_gathered:
                act(runner, target)
        if is_late:
            for group, _ in row.waits:
                group.wait()

    note_kept = FSDPState.note_kept

    def wait_and_note(state: FSDPState, steps: object) -> None:
        iteration: Any = state.iteration
        if iteration.current_pass is Pass.BACKWARD:
            state.group.wait()
        note_kept(state, steps)

    with (
        mock.patch.object(ScheduleRunner, "_perform", perform),
        mock.patch.object(FSDPState, "note_kept", wait_and_note),
        mock.patch.object(passes, "prefetch", _prefetch_of_held()),
    ):
        yield


def _prefetch_of_held() -> Any:
    """Return ``passes.prefetch``, changed to prefetch groups that are in memory when the schedule is right.

    A prefetch also takes all of a fused gather, and leaves none of it for those groups that are in memory then.
    """
    source = inspect.getsource(passes.prefetch)
    for old, new in {
        "            if name in held:\n": "            if name in held:\n"
        "                own.insert(place, Gather((name,)))\n"
        "                place += 1\n",
        "moved = Gather(tuple(group for group in found.groups if group not in held))": "moved = found",
    }.items():
        assert old in source
        source = source.replace(old, new)
    names = dict(vars(passes))
    exec(f"from __future__ import annotations\n{source}", names)
    return names["prefetch"]
