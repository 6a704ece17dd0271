"""``timeline``: merges the timelines of all ranks of a run into a Chrome trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from composable_fsdp.cli.printing import Json, console, print_error, print_json
from composable_fsdp.diagnostics._timeline_files import merged
from composable_fsdp.diagnostics._timeline_picture import draw_step
from composable_fsdp.diagnostics.timeline import write_chrome_trace
from composable_fsdp.errors import UnsupportedError

__all__ = ["timeline"]


def timeline(
    folder: Annotated[Path, typer.Argument(help="the folder of COMPOSABLE_FSDP_TIMELINE", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="the Chrome trace; FOLDER/timeline.json by default", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="the picture; FOLDER/timeline.png by default", show_default=False)
    ] = None,
    step: Annotated[int, typer.Option(help="the step to draw, from 0; negative numbers count from the end")] = -1,
    as_json: Json = False,
) -> None:
    """Show the steps of all ranks, with the predicted one, and write them as a Chrome trace and a picture.

    Perfetto (ui.perfetto.dev) and chrome://tracing open the trace. A run writes its timelines to the folder that the
    environment variable COMPOSABLE_FSDP_TIMELINE names, when it ends. Times are medians over the training steps.

    Example: composable-fsdp timeline runs/timeline
    """
    processes = merged(folder)
    written = [out or folder / "timeline.json"]
    write_chrome_trace(written[0], processes)
    try:
        draw_step(picture or folder / "timeline.png", processes, step)
        written.append(picture or folder / "timeline.png")
    except UnsupportedError as error:
        if picture is not None:
            raise
        print_error(f"no picture: {error}")
    rows = [lanes.summary() for lanes in processes]
    if as_json:
        print_json({"processes": rows, "files": list(map(str, written))})
        return
    out_console = console()
    out_console.print(_table(rows))
    for path in written:
        out_console.print(f"wrote {path}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("", "steps", "ms per step", "exposed ms", "share", "gathered MB", "reduced MB", "peak MiB")
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
    return table
