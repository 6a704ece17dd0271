"""Show the last events of every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.cli.printing import Json, console, print_json
from composable_fsdp.diagnostics._compare import Files, Row, Sequences, faults_in_order, read, sequences, waits
from composable_fsdp.diagnostics._records import Dump
from composable_fsdp.errors import ConfigurationError

__all__ = ["app"]

app = typer.Typer(help=__doc__, no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Show the last events of every rank."""


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="the folder with the files of all ranks", show_default=False)],
    around: Annotated[int, typer.Option(min=1, help="collectives to show before the first difference")] = 5,
    stacks: Annotated[bool, typer.Option("--stacks", help="also show the stacks of every rank's threads")] = False,
    as_json: Json = False,
) -> None:
    """Show ranks side by side, and mark the first difference.

    Exit code 0 if the ranks did the same, 1 if they differ or a file is missing, 2 if there is no file.

    Example: composable-fsdp diagnostics merge runs/diagnostics
    """
    files = read(folder)
    if not files.dumps and not files.damaged:
        raise ConfigurationError(f"there is no file of diagnostics in {folder}.")
    found = sequences(files.dumps)
    if as_json:
        print_json(_as_json(files, found, stacks=stacks))
    else:
        _show(console(), files, found, around, stacks=stacks)
    differ = any(each.first_difference is not None for each in found)
    raise typer.Exit(1 if differ or files.missing or files.stale or files.damaged else 0)


def _as_json(files: Files, found: Sequence[Sequences], *, stacks: bool) -> dict[str, Any]:
    return {
        "ranks": {rank: asdict(dump.header) for rank, dump in sorted(files.dumps.items())},
        "missing": files.missing,
        "stale": files.stale,
        "damaged": files.damaged,
        "process_groups": [
            {
                "group": each.group,
                "ranks": each.ranks,
                "first_difference": None if each.first_difference is None else asdict(each.rows[each.first_difference]),
            }
            for each in found
        ],
        "waits": [asdict(wait) for wait in waits(files.dumps)],
        "faults": [{"time": when, "rank": rank, **asdict(fault)} for when, rank, fault in faults_in_order(files.dumps)],
        **({"stacks": {rank: list(map(asdict, dump.stacks)) for rank, dump in files.dumps.items()}} if stacks else {}),
    }


def _show(out: Console, files: Files, found: Sequence[Sequences], around: int, *, stacks: bool) -> None:
    for name, problem in files.damaged.items():
        out.print(f"{name} cannot be read: {problem}")
    if not files.dumps:
        return
    _show_ranks(out, files)
    for each in found:
        _show_sequences(out, each, around)
    _show_faults(out, files.dumps)
    if stacks:
        _show_stacks(out, files.dumps)


def _show_ranks(out: Console, files: Files) -> None:
    table = Table("rank", "process", "written", "because of", "where", title=_versions(files.dumps))
    for rank, dump in sorted(files.dumps.items()):
        header = dump.header
        where = str(dump.report).removeprefix(f"rank {rank} ") if dump.report is not None else ""
        process = f"{header.process} on {header.host}"
        table.add_row(str(rank), process, _clock(header.written), _first_line(header.reason), where)
    out.print(table)
    if files.missing:
        out.print(f"No file of {format_ranks(files.missing)}: killed, or on another host.")
    if files.stale:
        out.print(f"The file of {format_ranks(files.stale)} is of an earlier attempt of the job.")


def _versions(dumps: Mapping[int, Dump]) -> str:
    found = {tuple(sorted(dump.header.versions.items())) for dump in dumps.values()}
    texts = [", ".join(f"{name} {version}" for name, version in each) for each in sorted(found)]
    return texts[0] if len(texts) == 1 else f"VERSIONS DIFFER: {'; '.join(texts)}"


def _show_sequences(out: Console, found: Sequences, around: int) -> None:
    first = found.first_difference
    name = f"process group {found.group} of {format_ranks(found.ranks)}"
    if first is None:
        out.print(f"{name}: the same on all, up to number {found.rows[-1].number}")
        return
    begin = max(0, first - around)
    rows = found.rows[begin : first + around]
    columns = _columns(rows)
    table = Table("", "number", *(format_ranks(ranks) for ranks in columns), title=name, title_justify="left")
    for index, row in enumerate(rows, start=begin):
        mark = "first difference" if index == first else ""
        table.add_row(mark, str(row.number), *(row.labels[ranks[0]] for ranks in columns), style="bold" if mark else "")
    out.print(table)


def _columns(rows: tuple[Row, ...]) -> list[list[int]]:
    """Group the ranks that did the same in all ``rows`` into one column."""
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(rows[0].labels):
        columns.setdefault(tuple(row.labels[rank] for row in rows), []).append(rank)
    return list(columns.values())


def _show_faults(out: Console, dumps: Mapping[int, Dump]) -> None:
    for wait in waits(dumps):
        awaited = format_ranks(wait.awaited)
        out.print(f"rank {wait.rank} waited for {awaited} in {wait.label}, number {wait.number}")
    for moment, rank, fault in faults_in_order(dumps):
        text = _first_line(fault.text)
        where = "" if text.startswith(fault.where) else f" in {fault.where}"
        out.print(f"{_clock(moment)} rank {rank}{where}: {fault.error and f'{fault.error}: '}{text}")


def _show_stacks(out: Console, dumps: Mapping[int, Dump]) -> None:
    for rank, dump in sorted(dumps.items()):
        for stack in dump.stacks:
            out.print(f"\nrank {rank}, thread {stack.thread}")
            for frame in stack.frames:
                out.print(f"  {frame}")


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment * 1000) % 1000:03d}"


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
