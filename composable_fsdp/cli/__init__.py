"""The console command ``composable-fsdp``, also ``python -m composable_fsdp``."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["main"]

_EXTRA = ("typer", "rich")


def main(name: str = "composable-fsdp") -> None:
    """Run the command line and exit. ``typer`` and ``rich`` are optional, so they are imported here.

    Args:
        name: the name of the command in its help.
    """
    try:
        from composable_fsdp.cli.app import command
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent not in _EXTRA:
            raise
        sys.stderr.write(f'This command needs {absent}, which is not installed: pip install "composable_fsdp[cli]"\n')
        sys.exit(2)
    programs: list[Callable[[], None]] = []
    try:
        command(prog_name=name, obj=programs)
    except SystemExit:
        if not programs:
            raise
    # A program runs after the command line has returned: Python handles its exceptions and its exit code as ever.
    for program in programs:
        program()
