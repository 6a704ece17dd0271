"""Shard models with FSDP, check the machines that run them, and manage their checkpoints.

Exit codes: 0 on success; 1 if a model does not fit, or something is missing, damaged, different or has failed; 2 if the
command is invalid.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import composable_fsdp
from composable_fsdp.cli import checkpoint_commands, doctor, plan_command, printing, timeline_command
from composable_fsdp.errors import ConfigurationError, FSDPError


def main(name: str = "composable-fsdp", arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        name: the name of the command in its help.
        arguments: the arguments of the command. ``None``: those of the process.
    """
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    found, unknown = _parser(name).parse_known_args(given)
    options = vars(found)
    command, traceback, parser = (options.pop(key) for key in ("command", "traceback", "parser"))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = command(**options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        printing.show_error("interrupted")
        code = 1
    except BrokenPipeError:  # whoever read stdout has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it ends
        code = 1
    except (FSDPError, RuntimeError, OSError) as error:
        if traceback:
            raise
        printing.show_error(f"error: {error}")
        code = 2 if isinstance(error, ConfigurationError) else 1
    # A program runs after the command line: Python handles its exceptions and its exit code as ever.
    sys.exit(code() if callable(code) else code)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    version = f"composable-fsdp {composable_fsdp.__version__}, torch {metadata.version('torch')}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--traceback", action="store_true", help="show the tracebacks of errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for each in (doctor, plan_command, timeline_command, checkpoint_commands):
        each.add_commands(commands)
    program = printing.add_command(commands, "run", run)
    program.usage = "%(prog)s [-h] [--allow-cpu] PROGRAM ... | -m MODULE ..."
    program.add_argument("--allow-cpu", action="store_true", help="make accelerate, Trainer and trl shard on CPU too")
    program.add_argument("-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE", help="a module")
    program.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a script; its arguments follow")
    return parser


def run(module: Sequence[str] | None, program: Sequence[str], *, allow_cpu: bool) -> Callable[[], None]:
    """Run a program written for torch's FSDP2 on this library.

    Torch's fully_shard, register_fsdp_forward_method and share_comm_ctx are replaced by ours. The exit code is that of
    the program.

    Examples:

      composable-fsdp run train.py --lr 1e-4

      torchrun --nproc-per-node 8 -m composable_fsdp run train.py --lr 1e-4

      torchrun --nproc-per-node 8 -m composable_fsdp run -m package.train --lr 1e-4

      torchrun --nproc-per-node 2 -m composable_fsdp run --allow-cpu examples/sft.py
    """
    if not module and (module is not None or not program):
        raise ConfigurationError("run needs a program, or -m and the name of a module.")
    if not module and not Path(program[0]).exists():
        raise ConfigurationError(f"there is no program {program[0]}.")
    if allow_cpu:
        from composable_fsdp.interop import allow_fsdp_on_cpu

        allow_fsdp_on_cpu()
    return partial(_run, [*(module or ()), *program], as_module=bool(module))  # what follows -- is not in module


def _run(arguments: Sequence[str], *, as_module: bool) -> None:
    """Run a script or a module as ``__main__`` with ``sys.argv`` and ``sys.path`` as Python sets them."""
    from composable_fsdp.interop import patch_torch

    sys.argv = list(arguments)
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11 and newer
        sys.path[0] = str(Path.cwd() if as_module else Path(arguments[0]).resolve().parent)
    patch_torch()
    try:
        if as_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if not end.code:
            _report_unused()
        raise
    _report_unused()


def _report_unused() -> None:
    """Say on the first rank if nothing was sharded: the program then did not run on this library."""
    from composable_fsdp._api.fully_shard import has_sharded

    if not has_sharded() and os.environ.get("RANK", "0") == "0":
        printing.show_error(
            "composable-fsdp run: this process sharded nothing. Its program did not call fully_shard of "
            "torch.distributed.fsdp. On CPU, accelerate, Trainer and trl shard only after run --allow-cpu. FSDP1's "
            "FullyShardedDataParallel stays torch's; in processes that the program spawns, call "
            "composable_fsdp.interop.patch_torch()."
        )
