"""Show the last events of every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.cli.printing import Json, console, first_line, print_error, print_json, table_of
from composable_fsdp.diagnostics.fault_file import Dump, Files, Sequences, read, sequences
from composable_fsdp.diagnostics.timeline import draw_step, merged, write_chrome_trace
from composable_fsdp.errors import ConfigurationError, UnsupportedError

__all__ = ["app", "timeline"]

app = typer.Typer(help=__doc__, no_args_is_help=True, callback=lambda: None)  # without one, it would be merge itself
_AROUND = 5
"""The number of collectives that are shown before the first difference, and from it on."""


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="the folder with the files of all ranks", show_default=False)],
    stacks: Annotated[bool, typer.Option("--stacks", help="also show the stacks of every rank's threads")] = False,
) -> None:
    """Show ranks side by side, and mark the first difference.

    Exit code 0 if the ranks did the same, 1 if they differ or a file is missing, 2 if there is no file.

    Example: composable-fsdp diagnostics merge runs/diagnostics
    """
    files = read(folder)
    if not files.dumps and not files.damaged:
        raise ConfigurationError(f"there is no file of diagnostics in {folder}.")
    found = sequences(files.dumps)
    _show(console(), files, found, stacks=stacks)
    differ = any(each.first_difference is not None for each in found)
    raise typer.Exit(1 if differ or files.missing or files.damaged else 0)


def timeline(
    folder: Annotated[Path, typer.Argument(help="the folder of COMPOSABLE_FSDP_TIMELINE", show_default=False)],
    step: Annotated[int, typer.Option(help="the step to draw, from 0; negative numbers count from the end")] = -1,
    as_json: Json = False,
) -> None:
    """Show the steps of all ranks, and write FOLDER/timeline.json and FOLDER/timeline.png.

    Perfetto (ui.perfetto.dev) opens the first; the second shows one step. A run writes its timelines to the folder that
    the environment variable COMPOSABLE_FSDP_TIMELINE names, when it ends. Times are medians over the training steps.

    Example: composable-fsdp timeline runs/timeline
    """
    processes = merged(folder)
    trace, picture = folder / "timeline.json", folder / "timeline.png"
    write_chrome_trace(trace, processes)
    written = [trace, picture]
    try:
        draw_step(picture, processes, step)
    except UnsupportedError as error:
        print_error(f"no picture: {error}")
        written.remove(picture)
    rows = [lanes.summary() for lanes in processes]
    if as_json:
        print_json({"processes": rows, "files": list(map(str, written))})
        return
    numbers = ("steps", "ms per step", "exposed ms", "share", "gathered MB", "reduced MB", "peak MiB")
    table = table_of(("",), numbers)
    for row in rows:
        table.add_row(
            row["title"],
            str(row["steps"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * row['exposed_seconds']:.2f}",
            f"{row['exposed_share']:.1%}",
            *(f"{row[name] / 1e6:.2f}" if row[name] else "" for name in ("gathered_bytes", "reduced_bytes")),
            f"{row['peak_bytes'] / 2**20:.1f}",
        )
    console().print(table)
    typer.echo("\n".join(f"wrote {path}" for path in written))


# -- merge


def _show(out: Console, files: Files, found: Sequence[Sequences], *, stacks: bool) -> None:
    for name, problem in files.damaged.items():
        out.print(f"{name} cannot be read: {problem}")
    if not files.dumps:
        return
    out.print(_ranks(files.dumps))
    if files.missing:
        out.print(
            f"No file of {format_ranks(files.missing)}: killed, on another host, or written by an earlier attempt."
        )
    for each in found:
        out.print(_sequences(each))
    faults = [(fault["time"], rank, fault) for rank, dump in files.dumps.items() for fault in dump["faults"]]
    for moment, rank, fault in sorted(faults, key=lambda each: each[:2]):  # clocks of hosts may differ
        text = first_line(fault["text"])
        where = "" if text.startswith(fault["where"]) else f" in {fault['where']}"
        out.print(f"{_clock(moment)} rank {rank}{where}: {fault['error'] and fault['error'] + ': '}{text}")
    for rank, dump in sorted(files.dumps.items()) if stacks else ():
        for thread, frames in dump["stacks"]:
            out.print(f"\nrank {rank}, thread {thread}", *frames, sep="\n  ")


def _ranks(dumps: Mapping[int, Dump]) -> Table:
    versions = {", ".join(f"{name} {v}" for name, v in sorted(dump["versions"].items())) for dump in dumps.values()}
    title = "VERSIONS DIFFER: " * (len(versions) > 1) + "; ".join(sorted(versions))
    table = table_of(("rank", "process", "written", "because of", "where"), title=title)
    for rank, dump in sorted(dumps.items()):
        process, where = f"{dump['process']} on {dump['host']}", dump["state"].removeprefix(f"rank {rank} ")
        table.add_row(str(rank), process, _clock(dump["written"]), first_line(dump["reason"]), where)
    return table


def _sequences(found: Sequences) -> Table | str:
    """Return the collectives around the first difference. Ranks that did the same in all of them share a column."""
    name = f"process group {found.group} of {format_ranks(found.ranks)}"
    if found.first_difference is None:
        return f"{name}: the same on all, up to number {found.rows[-1].number}"
    first = found.rows.index(found.first_difference)
    rows = found.rows[max(0, first - _AROUND) : first + _AROUND]
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(rows[0].labels):
        columns.setdefault(tuple(row.labels[rank] for row in rows), []).append(rank)
    table = table_of(("", "number", *map(format_ranks, columns.values())), title=name)
    for row, labels in zip(rows, zip(*columns, strict=True), strict=True):
        mark = "first difference" if row is found.first_difference else ""
        table.add_row(mark, str(row.number), *labels, style="bold" if mark else "")
    return table


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment * 1000) % 1000:03d}"
