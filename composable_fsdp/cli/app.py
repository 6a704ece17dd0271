"""Shard models with FSDP, check the machines that run them, and manage their checkpoints.

Exit codes: 0 on success; 1 if something is missing, damaged, different or has failed; 2 if the command is invalid.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from composable_fsdp._api.fsdp_module import has_sharded
from composable_fsdp.cli import checkpoint_commands, diagnostics_commands
from composable_fsdp.cli.doctor import doctor
from composable_fsdp.cli.plan_command import plan_model
from composable_fsdp.cli.printing import print_error
from composable_fsdp.errors import ConfigurationError, FSDPError
from composable_fsdp.interop import patch_torch

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


def run(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(help="a script, or -m and the name of a module; its arguments follow", show_default=False)
    ],
) -> None:
    """Run a program written for torch's FSDP2 on this library.

    Torch's fully_shard, register_fsdp_forward_method and share_comm_ctx are replaced by ours. The exit code is that of
    the program.

    Examples:

    composable-fsdp run train.py --lr 1e-4

    torchrun --nproc-per-node 8 -m composable_fsdp run train.py --lr 1e-4

    torchrun --nproc-per-node 8 -m composable_fsdp run -m package.train --lr 1e-4
    """
    programs: list[Callable[[], None]] = context.obj
    arguments = [program, *context.args]
    as_module = program == "-m"
    if as_module and len(arguments) == 1:
        raise ConfigurationError("-m needs the name of a module.")
    if not as_module and not Path(program).exists():
        raise ConfigurationError(f"there is no program {program}.")
    programs.append(partial(_run, arguments[as_module:], as_module=as_module))


def _run(arguments: Sequence[str], *, as_module: bool) -> None:
    """Run a script or a module as ``__main__`` with ``sys.argv`` and ``sys.path`` as Python sets them."""
    sys.argv = list(arguments)
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11 and newer
        sys.path[0] = str(Path.cwd() if as_module else Path(arguments[0]).resolve().parent)
    patch_torch()
    atexit.register(_report_unused)
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _report_unused() -> None:
    """Say on the first rank if nothing was sharded: the program then did not run on this library."""
    if not has_sharded() and os.environ.get("RANK", "0") == "0":
        print_error(
            "composable-fsdp run: this process sharded nothing. Its program did not call fully_shard of "
            "torch.distributed.fsdp. FSDP1's FullyShardedDataParallel stays torch's; in processes that the program "
            "spawns, call composable_fsdp.interop.patch_torch()."
        )


app = typer.Typer(
    cls=_Commands, help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(checkpoint_commands.app, name="checkpoint")
app.add_typer(diagnostics_commands.app, name="diagnostics")
app.command("doctor")(doctor)
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
