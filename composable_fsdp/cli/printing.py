"""Printing and options that several commands share."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

from composable_fsdp._text import text_table
from composable_fsdp.errors import printable

__all__ = ["Commands", "add_command", "first_line", "show", "show_error", "show_json", "text_table"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands, name: str, function: Callable[..., Any], *, has_json: bool = False
) -> argparse.ArgumentParser:
    """Add a command that calls ``function`` with its options as keywords. The help is the docstring.

    The function returns the exit code, or ``None`` for 0, or a program that runs once the command line has ended.
    ``has_json`` adds the option ``--json``, the keyword ``as_json``.
    """
    text = inspect.cleandoc(function.__doc__ or "").replace("%", "%%")
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name, help=first_line(text), description=text, formatter_class=form, allow_abbrev=False
    )
    parser.set_defaults(command=function, parser=parser)
    if has_json:
        parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return parser


def first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def show(text: str) -> None:
    """Print ``text`` on stdout."""
    _write(sys.stdout, text)


def show_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    show(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def show_error(text: str) -> None:
    """Print ``text`` on stderr."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """Write a line, with escapes for what the encoding of ``stream`` lacks."""
    encoding = stream.encoding or "utf-8"
    stream.write(f"{printable(text)}\n".encode(encoding, "backslashreplace").decode(encoding))
