"""``timeline`` shows the steps of every rank of a run."""

from __future__ import annotations

from pathlib import Path

from composable_fsdp.cli import printing
from composable_fsdp.errors import UnsupportedError


def add_commands(commands: printing.Commands) -> None:
    parser = printing.add_command(commands, "timeline", timeline, has_json=True)
    parser.add_argument("folder", type=Path, help="the folder of COMPOSABLE_FSDP_TIMELINE")


def timeline(folder: Path, as_json: bool) -> None:
    """Show the steps of all ranks, and write FOLDER/timeline.json and FOLDER/timeline.png.

    Perfetto (ui.perfetto.dev) opens the first; the second shows one step. A run writes its timelines to the folder that
    the environment variable COMPOSABLE_FSDP_TIMELINE names, when it ends. Times are medians over the training steps,
    from forward to forward. The last line says which rank the others wait for.

    Example: composable-fsdp timeline runs/timeline
    """
    from composable_fsdp.diagnostics.timeline import draw_step, merged, straggler, write_chrome_trace

    processes = merged(folder)
    written = [folder / "timeline.json", folder / "timeline.png"]
    write_chrome_trace(written[0], processes)
    try:
        draw_step(written[1], processes)
    except UnsupportedError as error:
        printing.show_error(f"no picture: {error}")
        del written[1]
    rows = [lanes.summary() for lanes in processes]
    late = straggler(rows)
    if as_json:
        printing.show_json({"processes": rows, "files": list(map(str, written)), "late": late})
        return
    numbers = ("steps", "ms per step", "in passes", "between", "exposed ms")
    parts = ("seconds", "passes_seconds", "between_seconds", "exposed_seconds")
    cells = [(row["title"], str(row["steps"]), *(f"{1e3 * row[part]:.2f}" for part in parts)) for row in rows]
    printing.show(printing.text_table(("", *numbers), cells, numbers))
    printing.show("\n".join([*(f"wrote {path}" for path in written), *([late] if late else [])]))
