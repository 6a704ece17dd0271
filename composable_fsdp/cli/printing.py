"""What all commands print in the same way."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

__all__ = ["Json", "console", "count", "print_error", "print_json"]

_WIDTH = 200
"""The width in columns of tables that are not printed to a terminal."""

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON")]


def console() -> Console:
    """Return a console on stdout that prints texts as they are."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def print_error(text: str) -> None:
    """Print ``text`` on stderr."""
    typer.echo(text, err=True)


def count(number: int, what: str) -> str:
    """Return ``number`` with the noun ``what``, in the plural if need be."""
    return f"{number} {what}{'' if number == 1 else 's'}"
