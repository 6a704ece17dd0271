"""Shard models with FSDP, check the machines that run them, and manage their checkpoints.

Exit codes: 0 on success; 1 if something is missing, damaged, different or has failed; 2 if the command is invalid.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from composable_fsdp.cli import checkpoint_commands, diagnostics_commands
from composable_fsdp.cli.calibrate import calibrate
from composable_fsdp.cli.doctor import doctor
from composable_fsdp.cli.plan_command import plan_model
from composable_fsdp.cli.printing import print_error
from composable_fsdp.cli.run_program import run
from composable_fsdp.errors import ConfigurationError, FSDPError

__all__ = ["app", "command"]


class _Commands(TyperGroup):
    """Prints errors of commands as one line on stderr, and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except (FSDPError, RuntimeError, OSError) as error:
            if ctx.params["traceback"]:
                raise
            print_error(f"error: {error}")
            raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error


app = typer.Typer(
    cls=_Commands, help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(checkpoint_commands.app, name="checkpoint")
app.add_typer(diagnostics_commands.app, name="diagnostics")
app.command("doctor")(doctor)
app.command("calibrate")(calibrate)
app.command("timeline")(diagnostics_commands.timeline)
app.command("plan")(plan_model)
app.command(
    "run",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True},
)(run)


@app.callback()
def _options(
    traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar="COMPOSABLE_FSDP_TRACEBACK", help="show the tracebacks of errors"),
    ] = False,
) -> None:
    pass


command = typer.main.get_command(app)
"""The command line. Unlike ``app``, a call of it leaves ``sys.excepthook`` unchanged."""
