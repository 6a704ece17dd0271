"""Printing and options that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table

from composable_fsdp.diagnostics.describe import count

__all__ = ["DTYPES", "Json", "console", "count", "first_line", "print_error", "print_json", "table_of"]

_WIDTH = 200
"""The width in columns of tables that are not printed to a terminal."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON")]


def console() -> Console:
    """Return a console on stdout that prints texts as they are."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)


def table_of(texts: Sequence[str], numbers: Sequence[str] = (), title: str | None = None) -> Table:
    """Return a table without rows, with columns of texts and then of numbers."""
    table = Table(title=title, title_justify="left")
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def print_error(text: str) -> None:
    """Print ``text`` on stderr."""
    typer.echo(text, err=True)
