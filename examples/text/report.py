"""Prints progress, a table of groups and the loss curve. Only rank 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from .sharding import Group
from .training import History
from .verify import Differences

WIDTH = 100  # the width of tables and lines without a terminal
MIB = 2**20


class Watcher(Protocol):
    """An object that is called after each step. ``step`` counts from 0."""

    def step_done(self, step: int) -> None: ...

    def report(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Silence:
    """A watcher that does nothing, for all ranks but one."""

    def step_done(self, step: int) -> None:
        pass

    def report(self, step: int, text: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Lines:
    """Prints a line per report, for a log file or a pipe."""

    title: str
    total: int

    def step_done(self, step: int) -> None:
        pass

    def report(self, step: int, text: str) -> None:
        print(f"{self.title} {step + 1:>{len(str(self.total))}}/{self.total}  {text}", flush=True)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Bar:
    """Shows a progress bar, for a terminal."""

    progress: Progress
    task: TaskID

    def step_done(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1)

    def report(self, step: int, text: str) -> None:
        self.progress.update(self.task, text=text)

    def close(self) -> None:
        self.progress.stop()


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

    def watchdog(self, title: str, total: int) -> Watcher:
        """Return a watcher for ``total`` steps."""
        if not self._speaks:
            return Silence()
        if not self._console.is_terminal:
            return Lines(title, total)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
        progress.start()
        return Bar(progress, progress.add_task(title, total=total, text=""))

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


def progress_text(loss: float, bytes_per_second: float, device: torch.device) -> str:
    """Return loss, speed over all ranks (a token is a byte), and this rank's memory."""
    return f"loss {loss:.3f}  {bytes_per_second:,.0f} tokens/s  {memory_in_use(device)}"


def memory_in_use(device: torch.device) -> str:
    """Return the peak memory allocated on the accelerator, or the current memory of this process."""
    if device.type == "cpu":
        return f"{psutil.Process().memory_info().rss / MIB:,.0f} MiB resident"
    return f"{torch.get_device_module(device).max_memory_allocated() / MIB:,.0f} MiB at peak"


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
