"""Command line of checkpoints: ``python -m composable_fsdp.checkpoint`` inspects, verifies and converts them."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. ``typer`` and ``rich`` belong to an optional extra, so they are imported here."""
    try:
        from composable_fsdp.checkpoint._tools.cli import app
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent not in ("typer", "rich"):
            raise
        sys.exit(f'this command needs {absent}, which is not installed: pip install "composable-fsdp[cli]"')
    app(prog_name="python -m composable_fsdp.checkpoint")


if __name__ == "__main__":
    main()
