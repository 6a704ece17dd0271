"""Inspect, verify and convert checkpoints.

Exit codes: 0 on success, 1 if a checkpoint is missing or damaged, 2 if the command is invalid.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import rich.filesize
import torch
import typer
from rich.console import Console
from rich.table import Table

from composable_fsdp.checkpoint._tools.convert import MAX_FILE_BYTES, convert
from composable_fsdp.checkpoint._tools.inspect import Description, FolderDescription, describe, describe_folder
from composable_fsdp.checkpoint._tools.sources import Kind, kind_of
from composable_fsdp.checkpoint._tools.verify import verify as verify_files
from composable_fsdp.errors import ConfigurationError, FSDPError

__all__ = ["app"]

P = ParamSpec("P")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_WIDTH = 200
"""Table width in columns if stdout is not a terminal."""

_SUFFIXES = {".pt": Kind.TORCH, ".pth": Kind.TORCH, ".bin": Kind.TORCH, ".ckpt": Kind.TORCH}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Source = Annotated[Path, typer.Argument(help="a checkpoint of any kind, or a folder of them", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def _report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Print errors as one line on stderr and set the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        try:
            command(*args, **options)
        except (FSDPError, OSError) as error:
            _print_stderr(f"error: {error}")
            raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error

    return run


def _print_stderr(text: str) -> None:
    typer.echo(text, err=True)


# -- inspect


@app.command("inspect")
@_report_errors
def _inspect(
    path: Source,
    as_json: Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="compare checksums too, which reads all files")] = False,
) -> None:
    """Show the contents of a checkpoint, or the checkpoints in a folder, and which files are missing or damaged."""
    is_folder = kind_of(path) is Kind.FOLDER
    found = describe_folder(path, verify=verify) if is_folder else describe(path, verify=verify)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    if isinstance(found, FolderDescription):
        _show_folder(console, found)
    else:
        _show(console, found)


def _size(nbytes: int) -> str:
    return rich.filesize.decimal(nbytes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _show_folder(console: Console, found: FolderDescription) -> None:
    table = Table("step", "name", "ranks", "size", "")
    for each in found.checkpoints:
        marks = ["newest"] if each.name == found.newest else []
        marks += ["newest intact"] if each.name == found.newest_intact != found.newest else []
        note = "; ".join([*marks, each.problem] if each.problem else marks)
        numbers = (str(each.ranks), _size(each.nbytes)) if each.ranks else ("", "")
        table.add_row(str(each.step), each.name, *numbers, note)
    console.print(found.path, soft_wrap=True)
    console.print(table)
    if found.leftovers:
        console.print(f"left by killed saves, the next one removes it: {', '.join(found.leftovers)}")


def _show(console: Console, found: Description) -> None:
    console.print(f"{found.path} ({found.kind})", soft_wrap=True)
    table = Table()
    table.add_column("tensor", overflow="fold")
    for column in ("shape", "dtype"):
        table.add_column(column)
    table.add_column("size", justify="right")
    for tensor in found.tensors:
        size = f"as {tensor.same_as}" if tensor.same_as else _size(tensor.nbytes)
        table.add_row(tensor.name, " × ".join(map(str, tensor.shape)) or "scalar", tensor.dtype, size)
    console.print(table)
    for line in _summary(found):
        console.print(line, soft_wrap=True)


def _summary(found: Description) -> list[str]:
    own = [tensor for tensor in found.tensors if tensor.same_as is None]
    tied = f", {len(found.tensors) - len(own)} more tied to these" if len(own) < len(found.tensors) else ""
    lines = [f"model: {_count(len(own), 'tensor')}{tied}, {_size(sum(tensor.nbytes for tensor in own))}"]
    if found.optimizer is not None:
        each = found.optimizer
        groups = "" if each.groups is None else f" in {_count(each.groups, 'group')}"
        keys = ", ".join(f"{key} ({count})" for key, count in each.keys.items())
        lines.append(
            f"optimizer: state of {_count(each.parameters, 'parameter')}{groups}, {_size(each.nbytes)}: {keys}"
        )
    for rank, keys_of in found.extra.items():
        named = "classes that are not admitted" if keys_of is None else ", ".join(keys_of) or "nothing"
        lines.append(f"extra of rank {rank}: {named}")
    lines += [f"{name}: {_size(nbytes) if nbytes else 'no tensors'}" for name, nbytes in found.others.items()]
    if found.saved:
        saved = found.saved
        versions = f"composable_fsdp {saved['library']}, torch {saved['torch']}"
        lines.append(f"step {saved['step']}, saved by {_count(saved['ranks'], 'rank')} with {versions}")
    return [*lines, f"all tensors: {_size(found.nbytes)}", *(f"damaged: {problem}" for problem in found.problems)]


# -- verify


@app.command("verify")
@_report_errors
def _verify(path: Source, as_json: Json = False) -> None:
    """Check that files are complete and checksums match. Exit code 1 if not."""
    result = verify_files(path)
    if as_json:
        problems: dict[str, Any] = {"problems": result.problems, "files": result.files, "nbytes": result.nbytes}
        typer.echo(json.dumps({**problems, "unchecked": result.unchecked}, indent=2))
    else:
        for problem in result.problems:
            _print_stderr(problem)
        if not result.problems:
            typer.echo(f"{path} is intact: {_count(result.files, 'file')}, {_size(result.nbytes)}")
        if result.unchecked:
            _print_stderr(f"note: {result.unchecked}")
    if result.problems:
        raise typer.Exit(1)


# -- convert


@app.command("convert")
@_report_errors
def _convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="a directory, or a file with --to torch", show_default=False)],
    to: Annotated[
        str | None, typer.Option(metavar="KIND", help="dcp, torch or safetensors; torch if TARGET is a .pt file")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the model's floating-point tensors: bfloat16, float32, …")
    ] = None,
    max_file_bytes: Annotated[int, typer.Option(help="maximum bytes per file; not for torch")] = MAX_FILE_BYTES,
    model_only: Annotated[bool, typer.Option("--model-only", help="leave out the optimizer and the rest")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing checkpoint")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not compare checksums of SOURCE first")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="admit any class, which can run any code in SOURCE")] = False,
) -> None:
    """Convert between directories of torch.distributed.checkpoint, files of torch.save and safetensors."""
    left_out = convert(
        source,
        target,
        _kind(to, target),
        dtype=None if dtype is None else _dtype(dtype),
        max_file_bytes=max_file_bytes,
        model_only=model_only,
        force=force,
        verify=not no_verify,
        weights_only=not trust,
    )
    typer.echo(f"{target} is complete")
    if left_out:
        _print_stderr(f"left out: {', '.join(left_out)}")


def _kind(to: str | None, target: Path) -> Kind:
    known = [kind for kind in Kind if kind is not Kind.FOLDER]
    if to is None and target.suffix in _SUFFIXES:
        return _SUFFIXES[target.suffix]
    names = ", ".join(kind.value for kind in known)
    if to is None:
        raise ConfigurationError(f"{target} has no suffix that says its kind. Pass --to with one of {names}.")
    for kind in known:
        if kind.value == to:
            return kind
    raise ConfigurationError(f"--to must be one of {names}, not {to}.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(f"--dtype must be a floating-point one such as bfloat16 or float32, not {name}.")
    return found
