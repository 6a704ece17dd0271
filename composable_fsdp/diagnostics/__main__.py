"""``python -m composable_fsdp.diagnostics``: shows the diagnostics of ranks side by side."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. ``typer`` and ``rich`` are optional dependencies, so they are imported here."""
    try:
        from composable_fsdp.diagnostics._commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f'This command needs typer and rich, but {error.name} is not installed: pip install "composable-fsdp[cli]"'
        )
    app(prog_name="python -m composable_fsdp.diagnostics")


if __name__ == "__main__":
    main()
