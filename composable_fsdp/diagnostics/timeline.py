"""Timelines of recorded training steps, as Chrome traces and as pictures.

A timeline has lanes of slices, as a profiler shows them: the passes of the model; computation, which is the rest of the
passes without waits; the all-gathers and the reductions of each group; and the waits of the host. The times are those
of the host. Where waits block it (on CPU), waits are the exposed communication. On devices with streams, slices of
collectives end where the host has made a stream wait for them: there, torch's profiler has the times of the device.

The file of a rank is a Chrome trace of its own, by the clock of its host in microseconds since 1970.
"""

from __future__ import annotations

import io
import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from composable_fsdp._consistency.rank_report import MOST_RANKS
from composable_fsdp._files import read_text, replace_file
from composable_fsdp.errors import ConfigurationError, UnsupportedError, printable
from composable_fsdp.trace import Operation, TraceEvent

PASSES, COMPUTE, GATHER, REDUCE, WAITS = LANES = ("passes", "compute", "gather", "reduce", "waits")
"""The lanes in the order of their display."""
_COLORS = {PASSES: "#d0d0d0", COMPUTE: "#8fb9dd", GATHER: "#7cc39a", REDUCE: "#f0b26b", WAITS: "#d9534f"}
_MOST_PROCESSES = 8
_LATE = 0.05
"""The least part of a step for which a rank waits for another one that is named."""
_FONT_SIZE = 10
"""The size in points. A picture is 7 inches wide, so its letters have 8 pixels where it is shown 420 pixels wide."""
_LETTERS_PER_WIDTH = 75
"""The letters of a label that fit into the width of the picture."""
_MOST_SECONDS = 1e11


class Slice(NamedTuple):
    """An interval of one lane, in seconds. Collectives have bytes."""

    lane: str
    name: str
    begin: float
    end: float
    bytes: int = 0


class Step(NamedTuple):
    """A training step: from the begin of its first forward to the end of its last backward, and on to ``end``."""

    begin: float
    passed: float
    end: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Lanes:
    """The timeline of the rank ``title``: the slices of all lanes."""

    title: str
    slices: tuple[Slice, ...]

    def lane(self, name: str) -> list[Slice]:
        """Return the slices of a lane."""
        return [each for each in self.slices if each.lane == name]

    @property
    def steps(self) -> list[Step]:
        """The training steps. A step lasts to the begin of the next one; the last, to the end of its passes.

        Backwards without a forward between them are of one step. Forwards without a backward belong to none. A wait
        counts in the step in which it begins.
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
        exposed = [0.0] * len(passes)
        for each in self.lane(WAITS):
            number = bisect_right(begins, each.begin) - 1
            if number >= 0 and each.begin < ends[number]:
                exposed[number] += each.end - each.begin
        return [Step(*each, end, waits) for each, end, waits in zip(passes, ends, exposed, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return the number of steps and, as medians of them, their seconds.

        ``seconds`` is the time from forward to forward. The last step has no next one, so that it counts only if it is
        the only one.
        """
        steps = self.steps
        counted = steps[:-1] or steps

        def middle(value_of: Callable[[Step], float]) -> float:
            return median([value_of(each) for each in counted] or [0.0])

        return {
            "title": self.title,
            "steps": len(steps),
            "seconds": middle(lambda each: each.seconds),
            "passes_seconds": middle(lambda each: each.passed - each.begin),
            "between_seconds": middle(lambda each: each.end - each.passed),
            "exposed_seconds": middle(lambda each: each.exposed_seconds),
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


def performed(events: Iterable[TraceEvent], title: str = "rank 0", ahead: float = 0.0) -> Lanes:
    """Return the timeline of recorded ``events``, as a ``Recorder`` has them, with ``ahead`` added to their times.

    Collectives of one lane run one after the other, so a slice begins at its launch or when the one before has ended.
    It ends when the host had waited for it.
    """
    known = sorted(events, key=lambda event: event.end)
    slices = sorted([*_passes_and_computation(known), *_collectives(known)], key=lambda each: each.begin)
    return Lanes(title, tuple(each._replace(begin=each.begin + ahead, end=each.end + ahead) for each in slices))


def _passes_and_computation(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the passes, the waits, and the computation between waits, by the group that was waited for last."""
    waits = deque(event for event in events if event.operation in (Operation.WAIT, Operation.REDUCED))
    computed_from = 0.0
    for each in (event for event in events if event.operation in (Operation.FORWARD, Operation.BACKWARD)):
        yield Slice(PASSES, str(each), each.begin, each.end)
        computed_from, group = max(computed_from, each.begin), "between groups"  # a pass may run within another one
        while waits and waits[0].end <= each.end:
            wait = waits.popleft()
            if wait.begin > computed_from:
                yield Slice(COMPUTE, group, computed_from, wait.begin)
            if wait.end > wait.begin:
                yield Slice(WAITS, str(wait), wait.begin, wait.end)
            computed_from = max(computed_from, wait.end)
            group = wait.group if wait.operation is Operation.WAIT else group
        if each.end > computed_from:
            yield Slice(COMPUTE, group, computed_from, each.end)
            computed_from = each.end


def _collectives(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the collectives of both lanes. Groups that share a launch are one slice, which the first wait ends."""
    begins = {Operation.UNSHARD: GATHER, Operation.REDUCE: REDUCE}
    ends = {Operation.WAIT: GATHER, Operation.REDUCED: REDUCE}
    in_flight: dict[str, list[list[TraceEvent]]] = {GATHER: [], REDUCE: []}
    """The launches of each lane."""
    free_from = dict.fromkeys(in_flight, 0.0)
    for event in events:
        if lane := begins.get(event.operation):
            launches = in_flight[lane]
            if not launches or launches[-1][0].begin != event.begin:
                launches.append([])
            launches[-1].append(event)
        elif lane := ends.get(event.operation):
            found = (each for each in in_flight[lane] if any(member.group == event.group for member in each))
            if launch := next(found, None):
                in_flight[lane].remove(launch)
                begin = max(launch[0].begin, min(free_from[lane], event.end))
                free_from[lane] = event.end
                name = f"{lane} {', '.join(each.group for each in launch)}"
                yield Slice(lane, name, begin, event.end, sum(each.bytes for each in launch))
        elif event.operation is Operation.BACKWARD:  # sums that stay on this rank until a later backward
            in_flight[REDUCE].clear()


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


def write_chrome_trace(path: str | os.PathLike[str], processes: Sequence[Lanes]) -> None:
    """Write ``processes``, each with its lanes, as a Chrome trace that begins at 0."""
    origin = min((each.begin for lanes in processes for each in lanes.slices), default=0.0)
    replace_file(path, json.dumps(_chrome_trace(processes, origin)))


def write_rank(folder: Path, rank: int, lanes: Lanes) -> None:
    """Write the file of ``rank``, with the restarts by torchrun before."""
    document = {"rank": rank, "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    replace_file(folder / f"rank-{rank:05d}.json", json.dumps(document | _chrome_trace([lanes])))


def _chrome_trace(processes: Sequence[Lanes], origin: float = 0.0) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for pid, lanes in enumerate(processes):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": lanes.title}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for each in lanes.slices:
            event = {"ph": "X", "name": each.name, "cat": each.lane, "pid": pid, "tid": LANES.index(each.lane)}
            event |= {"ts": round(1e6 * (each.begin - origin), 3), "dur": round(1e6 * (each.end - each.begin), 3)}
            events.append(event | {"args": {"bytes": each.bytes} if each.bytes else {}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merged(folder: Path) -> list[Lanes]:
    """Return the timelines of the ranks in ``folder`` of the job's last attempt, by the clocks of their hosts.

    Raises:
        ConfigurationError: there is no file in ``folder``, or one is damaged.
    """
    found: dict[int, tuple[int, Lanes]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            rank, attempt, lanes = _of_rank(json.loads(read_text(folder, path.name)))
        except (ValueError, OSError, RecursionError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        except (AttributeError, LookupError, TypeError) as error:
            raise ConfigurationError(f"{path} cannot be read: it is no timeline of this version: {error!r}") from error
        found[rank] = attempt, lanes
    if not found:
        raise ConfigurationError(
            f"there is no timeline in {folder}. Set COMPOSABLE_FSDP_TIMELINE={folder} for a run; ranks write when they "
            "end."
        )
    last = max(attempt for attempt, _ in found.values())
    return [lanes for _, (attempt, lanes) in sorted(found.items()) if attempt == last]


def _of_rank(document: Any) -> tuple[int, int, Lanes]:
    """Return the rank, the attempt and the timeline of a file, whose texts become printable.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: it is not the file of a rank, or is damaged.
    """
    rank, attempt = (_number(document[name], MOST_RANKS, name) for name in ("rank", "attempt"))
    slices: list[Slice] = []
    for each in document["traceEvents"]:
        if each["ph"] == "X":
            begin, seconds = (float(_number(each[name], 1e6 * _MOST_SECONDS, name)) / 1e6 for name in ("ts", "dur"))
            nbytes = int(_number(each["args"].get("bytes", 0), 1 << 63, "bytes"))
            lane = LANES[LANES.index(each["cat"])]
            slices.append(Slice(lane, printable(str(each["name"])), begin, begin + seconds, nbytes))
    return int(rank), int(attempt), Lanes(f"rank {rank}", tuple(sorted(slices, key=lambda each: each.begin)))


def _number(value: Any, most: float, name: str) -> int | float:
    if type(value) not in (int, float) or not 0 <= value < most:
        raise ValueError(f"{name}: it is not a number from 0 to {most:g}")
    number: int | float = value
    return number


# -- pictures


def draw_step(path: str | os.PathLike[str], processes: Sequence[Lanes]) -> None:
    """Draw one training step as a picture, the processes one above the other.

    Args:
        path: the file. Its ending chooses the format, such as ``.png`` or ``.svg``.
        processes: the timelines of ranks, with one clock. Eight of them are drawn at most, in the step of the first
            whose duration is the nearest to the median.

    Raises:
        ConfigurationError: there is no step.
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
    counted = steps[:-1] or steps
    middle = median(each.seconds for each in counted)
    step = min(counted, key=lambda each: abs(each.seconds - middle))
    shown, drawn = processes[:_MOST_PROCESSES], io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc in the current folder, which others may have sent, can run latex
        figure = Figure(figsize=(7, 0.6 + 1.9 * len(shown)), layout="constrained")
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, lanes in zip(rows, shown, strict=True):
            exposed = _draw_lanes(axes, lanes, step)
            title = f"step {steps.index(step)} of {len(steps)}: {1e3 * step.seconds:.1f} ms, {exposed:.0%} exposed"
            axes.set_title(f"{lanes.title}, {title}", loc="left", fontsize=_FONT_SIZE)
            axes.set_yticks(range(len(LANES)), LANES, fontsize=_FONT_SIZE)
            axes.tick_params(axis="x", labelsize=_FONT_SIZE)
            axes.invert_yaxis()
        rows[-1].set_xlabel("ms", fontsize=_FONT_SIZE)
        rows[-1].set_xlim(0, 1e3 * max(step.seconds, 1e-6))  # a damaged file may have a step of no time
        figure.savefig(drawn, dpi=200, format=Path(path).suffix[1:] or None)
    replace_file(path, drawn.getvalue())


def _draw_lanes(axes: Any, lanes: Lanes, step: Step) -> float:
    """Draw the slices of ``lanes`` during ``step``. Return the part of it in which the host waits."""
    bars: list[tuple[float, float]] = []
    for row, (lane, color) in enumerate(_COLORS.items()):
        inside = [each for each in lanes.lane(lane) if each.end > step.begin and each.begin < step.end]
        shown = [(max(each.begin, step.begin), min(each.end, step.end)) for each in inside]
        bars = [(1e3 * (first - step.begin), 1e3 * (last - first)) for first, last in shown]
        labelled = 0.0  # waits of a damaged file may overlap
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.4)
        for each, (left, width) in zip(inside, bars, strict=True):
            label = each.name.removeprefix(f"{lane} ")
            if left >= labelled and len(label) * 1e3 * step.seconds <= _LETTERS_PER_WIDTH * width:
                labelled = left + width
                text = axes.text(left + width / 2, row, label, fontsize=_FONT_SIZE, parse_math=False)
                text.set(ha="center", va="center", clip_on=True)
    waited = sum(width for _, width in bars)  # of the last lane
    return waited / (1e3 * step.seconds) if step.seconds else 0.0
