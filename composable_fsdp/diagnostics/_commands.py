"""The commands of ``python -m composable_fsdp.diagnostics``.

Exit codes: 0 if the ranks did the same, 1 if they differ or a file is missing, 2 if there is no file to merge.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.diagnostics._compare import Files, Row, Sequences, faults_in_order, read, sequences, waits
from composable_fsdp.diagnostics._records import Dump

__all__ = ["app"]

_WIDTH = 200
"""The width in columns of tables that are not printed to a terminal."""

app = typer.Typer(help="Show the last events of every rank.", add_completion=False, no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Show the last events of every rank."""


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="the folder with the files of all ranks", show_default=False)],
    around: Annotated[int, typer.Option(min=1, help="collectives to show before the first difference")] = 5,
    stacks: Annotated[bool, typer.Option("--stacks", help="also show the stacks of every rank's threads")] = False,
) -> None:
    """Show ranks side by side, and mark the first difference."""
    files = read(folder)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False, soft_wrap=False)
    for name, problem in files.damaged.items():
        console.print(f"{name} cannot be read: {problem}")
    if not files.dumps:
        typer.echo(f"error: there is no file of diagnostics in {folder}", err=True)
        raise typer.Exit(2)
    _show_ranks(console, files)
    found = sequences(files.dumps)
    for each in found:
        _show_sequences(console, each, around)
    _show_faults(console, files.dumps)
    if stacks:
        _show_stacks(console, files.dumps)
    differ = any(each.first_difference is not None for each in found)
    raise typer.Exit(1 if differ or files.missing or files.stale or files.damaged else 0)


def _show_ranks(console: Console, files: Files) -> None:
    table = Table("rank", "process", "written", "because of", "where", title=_versions(files.dumps))
    for rank, dump in sorted(files.dumps.items()):
        header = dump.header
        where = str(dump.report).removeprefix(f"rank {rank} ") if dump.report is not None else ""
        process = f"{header.process} on {header.host}"
        table.add_row(str(rank), process, _clock(header.written), _first_line(header.reason), where)
    console.print(table)
    if files.missing:
        console.print(f"No file of {format_ranks(files.missing)}: killed, or on another host.")
    if files.stale:
        console.print(f"The file of {format_ranks(files.stale)} is of an earlier attempt of the job.")


def _versions(dumps: Mapping[int, Dump]) -> str:
    found = {tuple(sorted(dump.header.versions.items())) for dump in dumps.values()}
    texts = [", ".join(f"{name} {version}" for name, version in each) for each in sorted(found)]
    return texts[0] if len(texts) == 1 else f"VERSIONS DIFFER: {'; '.join(texts)}"


def _show_sequences(console: Console, found: Sequences, around: int) -> None:
    first = found.first_difference
    name = f"process group {found.group} of {format_ranks(found.ranks)}"
    if first is None:
        console.print(f"{name}: the same on all, up to number {found.rows[-1].number}")
        return
    begin = max(0, first - around)
    rows = found.rows[begin : first + around]
    columns = _columns(rows)
    table = Table("", "number", *(format_ranks(ranks) for ranks in columns), title=name, title_justify="left")
    for index, row in enumerate(rows, start=begin):
        mark = "first difference" if index == first else ""
        table.add_row(mark, str(row.number), *(row.labels[ranks[0]] for ranks in columns), style="bold" if mark else "")
    console.print(table)


def _columns(rows: tuple[Row, ...]) -> list[list[int]]:
    """Group the ranks that did the same in all ``rows`` into one column."""
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(rows[0].labels):
        columns.setdefault(tuple(row.labels[rank] for row in rows), []).append(rank)
    return list(columns.values())


def _show_faults(console: Console, dumps: Mapping[int, Dump]) -> None:
    for wait in waits(dumps):
        awaited = format_ranks(wait.awaited)
        console.print(f"rank {wait.rank} waited for {awaited} in {wait.label}, number {wait.number}")
    for moment, rank, fault in faults_in_order(dumps):
        text = _first_line(fault.text)
        where = "" if text.startswith(fault.where) else f" in {fault.where}"
        console.print(f"{_clock(moment)} rank {rank}{where}: {fault.error and f'{fault.error}: '}{text}")


def _show_stacks(console: Console, dumps: Mapping[int, Dump]) -> None:
    for rank, dump in sorted(dumps.items()):
        for stack in dump.stacks:
            console.print(f"\nrank {rank}, thread {stack.thread}")
            for frame in stack.frames:
                console.print(f"  {frame}")


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment * 1000) % 1000:03d}"


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
