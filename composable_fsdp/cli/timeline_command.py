"""``timeline`` shows the steps of every rank of a run."""

from __future__ import annotations

from pathlib import Path

from composable_fsdp.cli import printing
from composable_fsdp.errors import UnsupportedError


def add_commands(commands: printing.Commands) -> None:
    parser = printing.add_command(commands, "timeline", timeline, has_json=True)
    parser.add_argument("folder", type=Path, help="the folder of COMPOSABLE_FSDP_TIMELINE")
    parser.add_argument(
        "--step",
        type=int,
        help="the step to draw, from 0; negative numbers count from the end (default: one of median time)",
    )


def timeline(folder: Path, step: int | None, as_json: bool) -> None:
    """Show the steps of all ranks, and write FOLDER/timeline.json and FOLDER/timeline.png.

    Perfetto (ui.perfetto.dev) opens the first; the second shows one step. A run writes its timelines to the folder that
    the environment variable COMPOSABLE_FSDP_TIMELINE names, when it ends. Times are medians over the training steps,
    from forward to forward. The last line says which rank the others wait for.

    Example: composable-fsdp timeline runs/timeline
    """
    from composable_fsdp.diagnostics.timeline import draw_step, merged, straggler, write_chrome_trace

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
