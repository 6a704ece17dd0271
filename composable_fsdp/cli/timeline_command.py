"""``timeline``: merges the timelines of all ranks of a run into a Chrome trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from composable_fsdp.cli.printing import Json, console, print_error, print_json, table_of
from composable_fsdp.diagnostics._timeline_files import merged
from composable_fsdp.diagnostics._timeline_picture import draw_step
from composable_fsdp.diagnostics.timeline import write_chrome_trace
from composable_fsdp.errors import UnsupportedError

__all__ = ["timeline"]


def timeline(
    folder: Annotated[Path, typer.Argument(help="the folder of COMPOSABLE_FSDP_TIMELINE", show_default=False)],
    step: Annotated[int, typer.Option(help="the step to draw, from 0; negative numbers count from the end")] = -1,
    as_json: Json = False,
) -> None:
    """Show the steps of all ranks, with the predicted one, and write FOLDER/timeline.json and FOLDER/timeline.png.

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
    console().print(table, *(f"wrote {path}" for path in written), sep="\n", soft_wrap=True)
