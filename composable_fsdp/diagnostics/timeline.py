"""Timelines of recorded training steps, as Chrome traces and as pictures.

A timeline has lanes of slices, as a profiler shows them: the passes of the model; computation, which is the rest of the
passes without waits; the all-gathers and the reductions of each group; and the waits of the host. The times are those
of the host. Where waits block it (on CPU), waits are the exposed communication. On devices with streams, slices of
collectives end where the host has made a stream wait for them: there, torch's profiler has the times of the device.
"""

from __future__ import annotations

import io
import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from composable_fsdp._files import replace_file
from composable_fsdp.diagnostics.recorded_events import read
from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.trace import Operation, TraceEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASSES, COMPUTE, GATHER, REDUCE, WAITS = LANES = ("passes", "compute", "gather", "reduce", "waits")
"""The lanes in the order of their display."""
_COLORS = {COMPUTE: "#8fb9dd", GATHER: "#7cc39a", REDUCE: "#f0b26b", WAITS: "#d9534f"}
_MOST_PROCESSES = 8
_LATE = 0.05
"""The least part of a step for which a rank waits for another one that is named."""
_FONT_SIZE = 10
"""The size in points. A picture is 7 inches wide, so its letters have 8 pixels where it is shown 420 pixels wide."""
_LETTERS_PER_WIDTH = 75
"""The letters of a label that fit into the width of the picture."""


class Slice(NamedTuple):
    """An interval of one lane, in seconds. ``details`` are JSON values."""

    lane: str
    name: str
    begin: float
    end: float
    details: Mapping[str, float] = {}  # never changed

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Step(NamedTuple):
    """A training step: from the begin of its first forward to the end of its last backward, and on to ``end``."""

    begin: float
    passed: float
    end: float
    exposed_seconds: float
    gathered_bytes: float
    reduced_bytes: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def passes_seconds(self) -> float:
        return self.passed - self.begin

    @property
    def between_seconds(self) -> float:
        """The time of the optimizer, the data and the rest of the program."""
        return self.end - self.passed


_SUMS: Mapping[str, Callable[[Slice], float]] = {
    WAITS: lambda each: each.seconds,
    GATHER: lambda each: each.details["bytes"],
    REDUCE: lambda each: each.details["bytes"],
}
"""The value of a slice that is summed for each step, by lane. A slice counts in the step in which it begins."""


@dataclass(frozen=True)
class Lanes:
    """The timeline of the rank ``title``: the slices of all lanes, and the bytes of unsharded parameters by time."""

    title: str
    slices: tuple[Slice, ...]
    memory: tuple[tuple[float, int], ...] = ()

    def lane(self, name: str) -> list[Slice]:
        """Return the slices of a lane."""
        return [each for each in self.slices if each.lane == name]

    @property
    def steps(self) -> list[Step]:
        """The training steps. A step lasts to the begin of the next one; the last, to the end of its passes.

        Backwards without a forward between them are of one step. Forwards without a backward belong to none.
        """
        passes: list[tuple[float, float]] = []
        forward: float | None = None
        for each in self.lane(PASSES):
            if each.name.startswith("forward"):
                forward = each.begin
            elif forward is not None:
                passes.append((forward, each.end))
                forward = None
            elif passes:
                passes[-1] = passes[-1][0], each.end
        begins = [begin for begin, _ in passes]
        ends = [*begins[1:], *(end for _, end in passes[-1:])]
        sums = [dict.fromkeys(_SUMS, 0.0) for _ in passes]
        for each in self.slices:
            number = bisect_right(begins, each.begin) - 1
            if each.lane in _SUMS and number >= 0 and each.begin < ends[number]:
                sums[number][each.lane] += _SUMS[each.lane](each)
        return [Step(*each, end, *own.values()) for each, end, own in zip(passes, ends, sums, strict=True)]

    @property
    def typical(self) -> int:
        """The number of the step whose time is the nearest to the median."""
        seconds = [each.seconds for each in self.steps]
        counted = seconds[:-1] or seconds
        middle = median(counted or [0.0])
        return min(range(len(counted)), key=lambda step: abs(counted[step] - middle), default=0)

    def summary(self) -> dict[str, Any]:
        """Return the number of steps and, as medians of them, their seconds and bytes.

        ``seconds`` is the time from forward to forward. The last step has no next one, so that it counts only if it is
        the only one.
        """
        steps = self.steps
        counted = steps[:-1] or steps

        def middle(value_of: Callable[[Step], float]) -> float:
            return median([value_of(each) for each in counted] or [0.0])

        seconds, exposed = middle(lambda each: each.seconds), middle(lambda each: each.exposed_seconds)
        return {
            "title": self.title,
            "steps": len(steps),
            "seconds": seconds,
            "passes_seconds": middle(lambda each: each.passes_seconds),
            "between_seconds": middle(lambda each: each.between_seconds),
            "exposed_seconds": exposed,
            "exposed_share": exposed / seconds if seconds else 0.0,
            "gathered_bytes": middle(lambda each: each.gathered_bytes),
            "reduced_bytes": middle(lambda each: each.reduced_bytes),
            "peak_bytes": max((held for _, held in self.memory), default=0),
        }


def straggler(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which ranks wait for which rank, from the summaries of all ranks, or an empty text if none is late.

    A rank that others wait for has more work of its own in each step, which is the time that it does not wait itself.
    """
    work = [
        {"in its passes": row["passes_seconds"] - row["exposed_seconds"], "between its steps": row["between_seconds"]}
        for row in rows
    ]
    late = max(range(len(rows)), key=lambda rank: sum(work[rank].values()), default=0)
    waits: dict[int, float] = {}
    for rank, row in enumerate(rows):
        seconds = min(sum(work[late].values()) - sum(work[rank].values()), row["exposed_seconds"])
        if seconds > _LATE * row["seconds"]:
            waits[rank] = seconds
    if not waits:
        return ""
    where = max(work[late], key=lambda part: work[late][part] - median(work[rank][part] for rank in waits))
    others = f" and {more} more rank{'s' * (more > 1)} wait" if (more := len(waits) - 1) else " waits"
    milliseconds = 1e3 * median(waits.values())
    return (
        f"{rows[min(waits)]['title']}{others} {milliseconds:.0f} ms a step for {rows[late]['title']}, which is late "
        f"{where}"
    )


def performed(events: Iterable[TraceEvent], title: str = "rank 0") -> Lanes:
    """Return the timeline of recorded ``events``, as a ``Recorder`` has them.

    Collectives of one lane run one after the other, so a slice begins at its launch or when the one before has ended.
    It ends when the host had waited for it. ``details`` have the bytes and how long the host waited.
    """
    known = sorted(events, key=lambda event: event.end)
    slices = sorted([*_passes_and_computation(known), *_collectives(known)], key=lambda each: each.begin)
    held, memory = 0, list[tuple[float, int]]()
    for event in known:
        if event.operation in (Operation.ALLOCATE, Operation.FREE):
            held += event.bytes if event.operation is Operation.ALLOCATE else -event.bytes
            memory.append((event.end, held))
    lost = -min([0, *(held for _, held in memory)])  # allocated before the first recorded event
    return Lanes(title, tuple(slices), tuple((moment, held + lost) for moment, held in memory))


def _passes_and_computation(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the passes, the waits, and the computation between waits, by the group that was waited for."""
    passes = [event for event in events if event.operation in (Operation.FORWARD, Operation.BACKWARD)]
    others = deque(events)
    computed_from = 0.0
    for each in passes:
        yield Slice(PASSES, str(each), each.begin, each.end)
        computed_from, group = max(computed_from, each.begin), ""  # a pass may run within another one
        while others and others[0].end <= each.end:
            event = others.popleft()
            is_wait = event.operation in (Operation.WAIT, Operation.REDUCED)
            ends_computation = is_wait or (event.operation is Operation.RESHARD and event.group == group)
            if ends_computation and event.begin > computed_from:
                yield Slice(COMPUTE, group or "between groups", computed_from, event.begin)
            if ends_computation:
                computed_from = max(computed_from, event.end)
                group = event.group if event.operation is Operation.WAIT else "" if not is_wait else group
            if is_wait and event.end > event.begin:
                yield Slice(WAITS, str(event), event.begin, event.end)
        if each.end > computed_from:
            yield Slice(COMPUTE, group or "between groups", computed_from, each.end)
            computed_from = each.end


def _collectives(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the collectives of both lanes. Groups that share a launch are one slice."""
    begins = {Operation.UNSHARD: GATHER, Operation.REDUCE: REDUCE}
    ends = {Operation.WAIT: GATHER, Operation.REDUCED: REDUCE}
    in_flight: dict[str, dict[str, deque[list[TraceEvent]]]] = {GATHER: {}, REDUCE: {}}
    """The launches of each group. One that was waited for is empty."""
    newest: dict[str, list[TraceEvent]] = {GATHER: [], REDUCE: []}
    free_from = dict.fromkeys(in_flight, 0.0)
    last_collective = 0.0
    for event in events:
        if event.operation is Operation.COLLECTIVE:
            last_collective = event.begin
        elif event.operation in begins:
            if not event.bytes and last_collective < event.begin:  # no parameters. Over shared memory, nothing is sent.
                continue
            lane = begins[event.operation]
            if not newest[lane] or newest[lane][0].begin != event.begin:
                newest[lane] = []
            newest[lane].append(event)
            in_flight[lane].setdefault(event.group, deque()).append(newest[lane])
        elif event.operation in ends:
            lane = ends[event.operation]
            launches = in_flight[lane].get(event.group, deque())
            while launches and not launches[0]:
                launches.popleft()
            if launches:
                launch = launches[0]
                details = {
                    "bytes": sum(each.bytes for each in launch),
                    "plain_bytes": sum(each.plain_bytes for each in launch),
                    "exposed_ms": round(1e3 * (event.end - event.begin), 4),
                }
                begin = max(launch[0].begin, min(free_from[lane], event.end))
                free_from[lane] = event.end
                yield Slice(lane, f"{lane} {', '.join(each.group for each in launch)}", begin, event.end, details)
                launch.clear()
        elif event.operation is Operation.BACKWARD:  # sums that stay on this rank until a later backward
            in_flight[REDUCE], newest[REDUCE] = {}, []


# -- files


def write_timeline(events: Iterable[TraceEvent], path: str | os.PathLike[str], *, title: str = "rank 0") -> None:
    """Write recorded events as a timeline: a Chrome trace, or a picture of the training step of median duration.

    Perfetto (ui.perfetto.dev) and chrome://tracing show Chrome traces.

    Args:
        events: a ``Recorder``, or its events.
        path: the file, a Chrome trace if it ends in ``.json``, else a picture such as ``.png``. Its folder must exist.
        title: the name of this rank in the file.

    Raises:
        ConfigurationError: there is no training step to draw.
        UnsupportedError: a picture was asked for without matplotlib.
    """
    write = write_chrome_trace if os.fspath(path).endswith(".json") else draw_step
    write(path, [performed(events, title)])


def merged(folder: Path) -> list[Lanes]:
    """Return the timelines of all ranks in ``folder`` by the clocks of their hosts.

    Raises:
        ConfigurationError: there is no file in ``folder``, or one is damaged.
    """
    found = []
    for each in read(folder):
        ahead = each.written - each.clock
        events = [replace(event, begin=event.begin + ahead, end=event.end + ahead) for event in each.events]
        found.append(performed(events, f"rank {each.rank}"))
    return found


def write_chrome_trace(path: str | os.PathLike[str], processes: Sequence[Lanes]) -> None:
    """Write ``processes``, each with its lanes, as a Chrome trace that begins at 0."""
    origin = min((each.begin for lanes in processes for each in lanes.slices), default=0.0)
    events = [event for number, lanes in enumerate(processes) for event in _chrome_events(number, lanes, origin)]
    replace_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _chrome_events(process: int, lanes: Lanes, origin: float) -> Iterator[dict[str, Any]]:
    def of(kind: str, name: str, lane: str, args: Mapping[str, Any], **values: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": process, "tid": LANES.index(lane), "args": args, **values}

    def microseconds(seconds: float) -> float:
        return round(1e6 * seconds, 3)

    yield of("M", "process_name", PASSES, {"name": lanes.title})
    for lane in filter(lanes.lane, LANES):
        yield of("M", "thread_name", lane, {"name": lane})
        yield of("M", "thread_sort_index", lane, {"sort_index": LANES.index(lane)})
    for each in lanes.slices:
        times = {"ts": microseconds(each.begin - origin), "dur": microseconds(each.seconds)}
        yield of("X", each.name, each.lane, each.details, cat=each.lane, **times)
    for moment, held in lanes.memory:
        yield of("C", "unsharded parameters", PASSES, {"bytes": held}, ts=microseconds(moment - origin))


# -- pictures


def draw_step(path: str | os.PathLike[str], processes: Sequence[Lanes], step: int | None = None) -> None:
    """Draw one training step as a picture, the processes one above the other.

    Args:
        path: the file. Its ending chooses the format, such as ``.png`` or ``.svg``.
        processes: the timelines of ranks, with one clock. Eight of them are drawn at most.
        step: the number of the step, from 0; negative numbers count from the end. ``None``: that whose duration on the
            first rank is the nearest to the median.

    Raises:
        ConfigurationError: there is no such step.
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError("a picture needs matplotlib: pip install matplotlib") from error
    steps = processes[0].steps if processes else []
    if not steps:
        raise ConfigurationError("there is no training step to draw: no forward with a backward was recorded.")
    if step is not None and not -len(steps) <= step < len(steps):
        raise ConfigurationError(f"there is no step {step}: {len(steps)} training steps were recorded.")
    number = processes[0].typical if step is None else range(len(steps))[step]
    shown = processes[:_MOST_PROCESSES]
    begin, end = steps[number].begin, steps[number].end
    drawn = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc in the current folder, which others may have sent, can run latex
        figure = Figure(figsize=(7, 0.6 + 1.7 * len(shown)), layout="constrained")
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, lanes in zip(rows, shown, strict=True):
            _draw_lanes(axes, lanes, number, begin, end)
        rows[-1].set_xlabel("ms", fontsize=_FONT_SIZE)
        rows[-1].set_xlim(0, 1e3 * max(end - begin, 1e-6))  # a damaged file may have a step of no time
        figure.savefig(drawn, dpi=200, format=Path(path).suffix[1:] or None)
    replace_file(path, drawn.getvalue())


def _draw_lanes(axes: Axes, lanes: Lanes, number: int, begin: float, end: float) -> None:
    """Draw the slices of ``lanes`` between two times, and name its step with that number."""
    for row, (lane, color) in enumerate(_COLORS.items()):
        inside = [each for each in lanes.lane(lane) if each.end > begin and each.begin < end]
        shown = [(max(each.begin, begin), min(each.end, end)) for each in inside]
        bars = [(1e3 * (first - begin), 1e3 * (last - first)) for first, last in shown]
        labelled = 0.0  # waits of a damaged file may overlap
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.4)
        for each, (left, width) in zip(inside, bars, strict=True):
            label = each.name.removeprefix(f"{lane} ")
            if left >= labelled and len(label) * 1e3 * (end - begin) <= _LETTERS_PER_WIDTH * width:
                labelled = left + width
                text = axes.text(left + width / 2, row, label, fontsize=_FONT_SIZE, parse_math=False)
                text.set(ha="center", va="center", clip_on=True)
    ends = [1e3 * (each.end - begin) for each in lanes.lane(PASSES) if begin <= each.end <= end]
    axes.vlines(ends, 0, 1, "grey", ":", linewidth=0.6, transform=axes.get_xaxis_transform())
    axes.set_yticks(range(len(_COLORS)), _COLORS, fontsize=_FONT_SIZE)
    axes.tick_params(axis="x", labelsize=_FONT_SIZE)
    axes.invert_yaxis()
    axes.set_title(_step_title(lanes, number), loc="left", fontsize=_FONT_SIZE)


def _step_title(lanes: Lanes, number: int) -> str:
    steps = lanes.steps
    if number >= len(steps):
        return f"{lanes.title}: has no step {number}"
    drawn = steps[number]
    share = drawn.exposed_seconds / drawn.seconds if drawn.seconds else 0.0
    return f"{lanes.title}, step {number} of {len(steps)}: {1e3 * drawn.seconds:.1f} ms, {share:.0%} exposed"
