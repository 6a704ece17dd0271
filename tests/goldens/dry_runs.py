"""Compares each pass of drawn programs with its dry run: the events that the root recorded, played without tensors."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from composable_fsdp import trace
from composable_fsdp.trace import Operation, TraceEvent
from tests._internals import DryLauncher, Replay, Root, Snapshot, events
from tests.goldens.cases import QUICK, known_programs
from tests.goldens.observe import PORTABLE
from tests.helpers.fuzz.programs import Program
from tests.helpers.fuzz.reference import Meshes, train
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import TRANSPORTS

__all__ = ["compare_dry_runs"]

BATCH = 50
"""The number of programs in one call of ``run_ranks``."""

SHOWN = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE, Operation.REDUCED)


@dataclass
class Span:
    """One pass: the state of the root before it, its events, as a part of a tape, and the lines of its trace."""

    snapshot: Snapshot
    tape: list[Any]
    begin: int
    first_line: int
    lines: Sequence[str] = ()
    is_whole: bool = False


class Recording:
    """The passes of all roots that are assembled in its context."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.spans: dict[Root, list[Span]] = {}

    def listen(self, event: TraceEvent) -> None:
        if event.operation in SHOWN:
            self.lines.append(str(event))

    def begin(self, root: Root, begin: Any, *args: Any) -> None:
        if root.current_pass.value != "idle":
            begin(root, *args)
            return
        snapshot, first_line = Snapshot.of(root), len(self.lines)
        begin(root, *args)
        tape = root.tape.of_forward if root.current_pass.value == "forward" else root.tape.events
        self.spans.setdefault(root, []).append(Span(snapshot, tape, len(tape), first_line))

    def end(self, root: Root, end: Any, *args: Any) -> None:
        end(root, *args)
        spans = self.spans.get(root)
        if root.current_pass.value == "idle" and spans and not spans[-1].is_whole:
            span = spans[-1]
            span.lines, span.is_whole = self.lines[span.first_line :], True

    @contextmanager
    def recording(self) -> Iterator[None]:
        with (
            self._wrapped("_begin_forward", self.begin),
            self._wrapped("_begin_backward", self.begin),
            self._wrapped("post_forward", self.end),
            self._wrapped("end_backward", self.end),
        ):
            trace.listeners.append(self.listen)
            try:
                yield
            finally:
                trace.listeners.remove(self.listen)

    def _wrapped(self, name: str, around: Any) -> Any:
        original = getattr(Root, name)

        def wrapped(root: Root, *args: Any) -> Any:
            if isinstance(root.launcher, DryLauncher):
                return original(root, *args)
            result = []
            around(root, lambda *a: result.append(original(*a)), *args)
            return result[0]

        return mock.patch.object(Root, name, wrapped)


def compare_dry_runs(
    *, quick: bool, only: Collection[str] = (), transports: Collection[str] = tuple(TRANSPORTS)
) -> int:
    """Compare each pass of the drawn programs with its dry run. Return 1 if any differs."""
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


def observe_dry_runs(programs: Sequence[Program]) -> list[str]:
    """Train programs. Return a line for each, and the difference where there is one."""
    meshes: Meshes = {}
    return [_observe(program, meshes) for program in programs]


def _observe(program: Program, meshes: Meshes) -> str:
    if program.beside is not None:
        return "left out: threads"
    recording = Recording()
    with recording.recording():
        for run in train(program, meshes):
            if run.error:
                raise RuntimeError(run.error)
    counts: Counter[str] = Counter()
    for root, spans in recording.spans.items():
        try:
            others = [each for other, of in recording.spans.items() if shares_names(root, other) for each in of]
            difference = compare(root, spans, others, counts)
        except Exception:
            return "differs: " + traceback.format_exc()[-1500:]
        if difference:
            return f"differs: {difference}"
    return f"equal: {counts['passes']} passes, {counts['lines']} lines, {counts['cut']} cut, {counts['mixed']} mixed"


def shares_names(root: Root, other: Root) -> bool:
    return root is not other and not root.states.keys().isdisjoint(other.states)


def compare(root: Root, spans: Sequence[Span], others: Sequence[Span], counts: Counter[str]) -> str:
    replay: Replay | None = None
    calls: dict[int, dict[int, Any]] = {}
    in_flight: list[events.Reduce] = []
    for number, span in enumerate(spans):
        end = span.first_line + len(span.lines)
        is_mixed = any(each.first_line < end and span.first_line < each.first_line + len(each.lines) for each in others)
        if not span.is_whole or is_mixed:
            replay = None
            counts["mixed" if is_mixed else "cut"] += 1
            continue
        if replay is None and span.snapshot.are_in_flight:
            counts["cut"] += 1
            continue
        if replay is None:
            replay = Replay(root, span.snapshot)
            calls.clear()
            in_flight.clear()
        replay.restore(span.snapshot)
        del replay.steps[:]
        replay.play(_events_of(span, spans[number + 1 :]), calls.setdefault(id(span.tape), {}))
        found = list(performed(replay.steps, in_flight))
        own = [line for line in span.lines if line.partition(" ")[2] in root.states]
        counts["passes"] += 1
        counts["lines"] += len(own)
        if found != own:
            text = "\n".join(list(difflib.unified_diff(own, found, "performed", "dry", lineterm="", n=4))[:30])
            return f"pass {number} of {len(spans)}, {span.tape[span.begin][0]}\n{text}"
    return ""


def _events_of(span: Span, later: Sequence[Span]) -> Sequence[Any]:
    """Return the events of ``span``: those on its tape until the next span of the same tape begins."""
    ends = [each.begin for each in later if each.tape is span.tape]
    return span.tape[span.begin : ends[0] if ends else len(span.tape)]


def performed(steps: Any, in_flight: list[Any]) -> Iterator[str]:
    """Yield the lines of the trace that the actions of a dry run would have."""
    for _, actions in steps:
        for action in actions:
            match action:
                case events.Gather(groups):
                    yield from (f"unshard {group}" for group in groups)
                case events.Wait(group):
                    yield f"wait {group}"
                case events.Free(group) | events.Shrink(group, _):
                    yield f"reshard {group}"
                case events.Reduce(buckets):
                    in_flight.append(action)
                    yield from (f"reduce {group}" for group in dict.fromkeys(bucket.group for bucket in buckets))
                case events.WaitReduce(count):
                    for done in [in_flight.pop(0) for _ in range(count)]:
                        names = dict.fromkeys(bucket.group for bucket in done.buckets)
                        yield from (f"reduced {name}" for name in names if not done.partial)
