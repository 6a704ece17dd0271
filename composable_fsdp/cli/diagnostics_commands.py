"""``diagnostics`` shows the last events of every rank, and ``timeline`` their steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.cli import printing
from composable_fsdp.diagnostics.fault_file import Dump, Files, Sequences, read, sequences
from composable_fsdp.diagnostics.timeline import draw_step, merged, straggler, write_chrome_trace
from composable_fsdp.errors import ConfigurationError, UnsupportedError

__all__ = ["add_commands"]

_AROUND = 5
"""The number of collectives that are shown before the first difference, and from it on."""


def add_commands(commands: printing.Commands) -> None:
    parser = printing.add_command(commands, "diagnostics", diagnostics)
    parser.add_argument("folder", type=Path, help="the folder with the files of all ranks")
    parser.add_argument("--stacks", action="store_true", help="also show the stacks of every rank's threads")
    parser = printing.add_command(commands, "timeline", timeline, has_json=True)
    parser.add_argument("folder", type=Path, help="the folder of COMPOSABLE_FSDP_TIMELINE")
    parser.add_argument(
        "--step",
        type=int,
        help="the step to draw, from 0; negative numbers count from the end (default: one of median time)",
    )


def diagnostics(folder: Path, stacks: bool) -> int:
    """Show the last events of all ranks side by side, and mark the first difference.

    Exit code 0 if the ranks did the same, 1 if they differ or a file is missing, 2 if there is no file.

    Example: composable-fsdp diagnostics runs/diagnostics
    """
    files = read(folder)
    if not files.dumps and not files.damaged:
        raise ConfigurationError(f"there is no file of diagnostics in {folder}.")
    found = sequences(files.dumps)
    _show(files, found, stacks=stacks)
    differ = any(each.first_difference is not None for each in found)
    return int(bool(differ or files.missing or files.damaged))


def timeline(folder: Path, step: int | None, as_json: bool) -> None:
    """Show the steps of all ranks, and write FOLDER/timeline.json and FOLDER/timeline.png.

    Perfetto (ui.perfetto.dev) opens the first; the second shows one step. A run writes its timelines to the folder that
    the environment variable COMPOSABLE_FSDP_TIMELINE names, when it ends. Times are medians over the training steps,
    from forward to forward. The last line says which rank the others wait for.

    Example: composable-fsdp timeline runs/timeline
    """
    processes = merged(folder)
    trace, picture = folder / "timeline.json", folder / "timeline.png"
    write_chrome_trace(trace, processes)
    written = [trace, picture]
    try:
        draw_step(picture, processes, step)
    except UnsupportedError as error:
        printing.show_error(f"no picture: {error}")
        written.remove(picture)
    rows = [lanes.summary() for lanes in processes]
    if as_json:
        printing.show_json({"processes": rows, "files": list(map(str, written)), "late": straggler(rows)})
        return
    numbers = (
        *("steps", "ms per step", "in passes", "between", "exposed ms", "share"),
        *("gathered MB", "reduced MB", "peak MiB"),
    )
    cells = [
        (
            row["title"],
            str(row["steps"]),
            *(f"{1e3 * row[f'{name}seconds']:.2f}" for name in ("", "passes_", "between_", "exposed_")),
            f"{row['exposed_share']:.1%}",
            *(f"{row[name] / 1e6:.2f}" if row[name] else "" for name in ("gathered_bytes", "reduced_bytes")),
            f"{row['peak_bytes'] / 2**20:.1f}",
        )
        for row in rows
    ]
    printing.show(printing.text_table(("", *numbers), cells, numbers))
    printing.show("\n".join(f"wrote {path}" for path in written))
    if text := straggler(rows):
        printing.show(text)


# -- diagnostics


def _show(files: Files, found: Sequence[Sequences], *, stacks: bool) -> None:
    for name, problem in files.damaged.items():
        printing.show(f"{name} cannot be read: {problem}")
    if not files.dumps:
        return
    printing.show(_ranks(files.dumps))
    if files.missing:
        printing.show(
            f"No file of {format_ranks(files.missing)}: killed, on another host, or written by an earlier attempt."
        )
    for each in found:
        printing.show(_sequences(each))
    faults = [(fault["time"], rank, fault) for rank, dump in files.dumps.items() for fault in dump["faults"]]
    for moment, rank, fault in sorted(faults, key=lambda each: each[:2]):  # clocks of hosts may differ
        text = printing.first_line(fault["text"])
        where = "" if text.startswith(fault["where"]) else f" in {fault['where']}"
        printing.show(f"{_clock(moment)} rank {rank}{where}: {fault['error'] and fault['error'] + ': '}{text}")
    for rank, dump in sorted(files.dumps.items()) if stacks else ():
        for thread, frames in dump["stacks"]:
            printing.show("\n  ".join((f"\nrank {rank}, thread {thread}", *frames)))


def _ranks(dumps: Mapping[int, Dump]) -> str:
    versions = {", ".join(f"{name} {v}" for name, v in sorted(dump["versions"].items())) for dump in dumps.values()}
    title = "VERSIONS DIFFER: " * (len(versions) > 1) + "; ".join(sorted(versions))
    rows = []
    for rank, dump in sorted(dumps.items()):
        process, where = f"{dump['process']} on {dump['host']}", dump["state"].removeprefix(f"rank {rank} ")
        rows.append((str(rank), process, _clock(dump["written"]), printing.first_line(dump["reason"]), where))
    return f"{title}\n{printing.text_table(('rank', 'process', 'written', 'because of', 'where'), rows, ())}"


def _sequences(found: Sequences) -> str:
    """Return the collectives around the first difference. Ranks that did the same in all of them share a column."""
    name = f"process group {found.group} of {format_ranks(found.ranks)}"
    if found.first_difference is None:
        return f"{name}: the same on all, up to number {found.rows[-1].number}"
    first = found.rows.index(found.first_difference)
    rows = found.rows[max(0, first - _AROUND) : first + _AROUND]
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(rows[0].labels):
        columns.setdefault(tuple(row.labels[rank] for row in rows), []).append(rank)
    cells = [
        ("first difference" if row is found.first_difference else "", str(row.number), *labels)
        for row, labels in zip(rows, zip(*columns, strict=True), strict=True)
    ]
    return f"{name}\n{printing.text_table(('', 'number', *map(format_ranks, columns.values())), cells, ())}"


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment * 1000) % 1000:03d}"
