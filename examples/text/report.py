"""Prints progress, a table of groups and the loss curve. Only rank 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from composable_fsdp.diagnostics import Reading

from .sharding import Group
from .training import History
from .verify import Differences

WIDTH = 100  # the width of tables and lines without a terminal


class Reporter:
    """Prints on rank 0 and does nothing elsewhere, so that callers need not check the rank."""

    def __init__(self, rank: int) -> None:
        self._speaks = rank == 0
        terminal = sys.stdout.isatty()
        self._console = Console(quiet=not self._speaks, width=None if terminal else WIDTH, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def print(self, table: Table) -> None:
        self._console.print(table)

    def progress(self, title: str, total: int) -> ProgressLine:
        """Return a progress line for ``total`` steps."""
        return ProgressLine(total, title, self._console)

    def show_groups(self, groups: Sequence[Group], dtype: torch.dtype) -> None:
        """Print a table with a row per group and the sum."""
        table = Table(title="groups", title_justify="left", show_footer=True)
        total = _sum(groups)
        table.add_column("group", footer="all")
        table.add_column("parameters", footer=f"{total.parameters:,}", justify="right")
        table.add_column("bytes on rank 0", footer=f"{total.bytes_at_rest:,}", justify="right")
        table.add_column(
            f"bytes gathered per step ({_dtype_name(dtype)})", footer=f"{total.bytes_gathered:,}", justify="right"
        )
        for group in groups:
            table.add_row(group.name, f"{group.parameters:,}", f"{group.bytes_at_rest:,}", f"{group.bytes_gathered:,}")
        self._console.print(table)

    def draw_curve(self, path: Path, history: History, before: float, after: float) -> None:
        """Write the loss of every step, with the two validations, as a PNG."""
        if not self._speaks:
            return
        end = history.start + len(history.losses)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(history.start, end), history.losses, linewidth=1.2, label="training, mean over ranks")
        axes.plot([history.start, end], [before, after], "o", color="tab:red", label="validation", zorder=3)
        axes.annotate(
            f"{before:.2f}",
            (history.start, before),
            ha="right",
            va="center",
            xytext=(-6, 0),
            textcoords="offset points",
        )
        axes.annotate(f"{after:.2f}", (end, after), ha="left", va="center", xytext=(6, 0), textcoords="offset points")
        axes.set(
            xlabel="optimizer steps", ylabel="loss (nats per byte)", title="Python's standard library, byte by byte"
        )
        axes.margins(x=0.09, y=0.08)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)


class ProgressLine:
    """Shows the last reading of a meter beside a bar in a terminal, and prints a line for each elsewhere."""

    def __init__(self, total: int, title: str, console: Console) -> None:
        self._total, self._title, self._text, self._console = total, title, "", console
        text = TextColumn("{task.fields[text]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total, text="")
        self._bar.start()

    def __call__(self, reading: Reading) -> None:
        """Show a reading."""
        self.show(reading.step, str(reading))

    def show(self, step: int, text: str = "") -> None:
        """Show that ``step`` steps are done, with a text; without one, only move the bar."""
        self._text = text or self._text
        self._bar.update(self._task, completed=step, text=self._text)
        if text and not self._console.is_terminal:
            line = f"{self._title} {step:>{len(str(self._total))}}/{self._total}  {text}"
            self._console.print(line, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


def outcome(check: str, found: Differences, allowed: Differences) -> str:
    """Return one line for one check."""
    verdict = "ok" if found.within(allowed) else "FAILED"
    pairs = {
        "loss": (found.loss, allowed.loss),
        "gradient norm": (found.norm, allowed.norm),
        "parameters": (found.parameter, allowed.parameter),
    }
    differences = ", ".join(f"{name} {value:.1e} (allowed {limit:.0e})" for name, (value, limit) in pairs.items())
    return f"{check}: {verdict}; largest difference in {differences}"


def _sum(groups: Sequence[Group]) -> Group:
    return Group(
        name="all",
        parameters=sum(each.parameters for each in groups),
        bytes_at_rest=sum(each.bytes_at_rest for each in groups),
        bytes_gathered=sum(each.bytes_gathered for each in groups),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
