"""Inspect, verify and convert checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.filesize import decimal

from composable_fsdp.checkpoint._tools import (
    MAX_FILE_BYTES,
    Description,
    FolderDescription,
    Kind,
    convert,
    describe,
    describe_folder,
    kind_of,
)
from composable_fsdp.checkpoint._tools import verify as verify_files
from composable_fsdp.cli.printing import Json, console, count, print_error, print_json, table_of
from composable_fsdp.errors import ConfigurationError

__all__ = ["app"]

app = typer.Typer(help=__doc__, no_args_is_help=True)

_SUFFIXES = {".pt": Kind.TORCH, ".pth": Kind.TORCH, ".bin": Kind.TORCH, ".ckpt": Kind.TORCH}

Source = Annotated[Path, typer.Argument(help="a checkpoint of any kind, or a folder of them", show_default=False)]
# -- inspect


@app.command("inspect")
def _inspect(
    path: Source,
    as_json: Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="compare checksums too, which reads all files")] = False,
) -> None:
    """Show the contents of a checkpoint, or the checkpoints in a folder, and which files are missing or damaged.

    Example: composable-fsdp checkpoint inspect runs/1 --verify
    """
    is_folder = kind_of(path) is Kind.FOLDER
    found = describe_folder(path, verify=verify) if is_folder else describe(path, verify=verify)
    if as_json:
        print_json(asdict(found))
    elif isinstance(found, FolderDescription):
        _show_folder(console(), found)
    else:
        _show(console(), found)


def _show_folder(out: Console, found: FolderDescription) -> None:
    table = table_of(("step", "name", "ranks", "size", ""))
    for each in found.checkpoints:
        marks = ["newest"] if each.name == found.newest else []
        marks += ["newest intact"] if each.name == found.newest_intact != found.newest else []
        note = "; ".join([*marks, each.problem] if each.problem else marks)
        numbers = (str(each.ranks), decimal(each.nbytes)) if each.ranks else ("", "")
        table.add_row(str(each.step), each.name, *numbers, note)
    out.print(found.path, soft_wrap=True)
    out.print(table)
    if found.leftovers:
        out.print(f"left by killed saves, the next one removes it: {', '.join(found.leftovers)}")


def _show(out: Console, found: Description) -> None:
    out.print(f"{found.path} ({found.kind})", soft_wrap=True)
    table = table_of(("tensor", "shape", "dtype"), ("size",))
    for tensor in found.tensors:
        size = f"as {tensor.same_as}" if tensor.same_as else decimal(tensor.nbytes)
        table.add_row(tensor.name, " × ".join(map(str, tensor.shape)) or "scalar", tensor.dtype, size)
    out.print(table)
    for line in _summary(found):
        out.print(line, soft_wrap=True)


def _summary(found: Description) -> list[str]:
    own = [tensor for tensor in found.tensors if tensor.same_as is None]
    tied = f", {len(found.tensors) - len(own)} more tied to these" if len(own) < len(found.tensors) else ""
    lines = [f"model: {count(len(own), 'tensor')}{tied}, {decimal(sum(tensor.nbytes for tensor in own))}"]
    if found.optimizer:
        lines.append(f"optimizer: state of {count(found.optimizer, 'parameter')}")
    lines += [f"{name}: {decimal(nbytes) if nbytes else 'no tensors'}" for name, nbytes in found.others.items()]
    if found.saved:
        saved = found.saved
        versions = f"composable_fsdp {saved['library']}, torch {saved['torch']}"
        lines.append(f"step {saved['step']}, saved by {count(saved['ranks'], 'rank')} with {versions}")
    return [*lines, f"all tensors: {decimal(found.nbytes)}", *(f"damaged: {problem}" for problem in found.problems)]


# -- verify


@app.command("verify")
def _verify(path: Source, as_json: Json = False) -> None:
    """Compare the files of checkpoints of save() with their manifests. Exit code 1 if they differ.

    Example: composable-fsdp checkpoint verify runs/1
    """
    result = verify_files(path)
    if as_json:
        print_json(asdict(result))
    else:
        for problem in result.problems:
            print_error(problem)
        if not result.problems:
            typer.echo(f"{path} is intact: {count(result.files, 'file')}, {decimal(result.nbytes)}")
    if result.problems:
        raise typer.Exit(1)


# -- convert


@app.command("convert")
def _convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="a directory, or a file with --to torch", show_default=False)],
    to: Annotated[
        Literal["dcp", "torch", "safetensors"] | None, typer.Option(help="torch if TARGET is a .pt file")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="dtype of the model's floating-point tensors"),
    ] = None,
    max_file_bytes: Annotated[int, typer.Option(help="maximum bytes per file of safetensors")] = MAX_FILE_BYTES,
    model_only: Annotated[bool, typer.Option("--model-only", help="leave out the optimizer and the rest")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file, or safetensors")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not compare checksums of SOURCE first")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="admit any class, which can run any code in SOURCE")] = False,
    as_json: Json = False,
) -> None:
    """Convert between directories of checkpoints, files of torch.save and safetensors, with all tensors in memory.

    Examples:

    composable-fsdp checkpoint convert runs/1 export --to safetensors --dtype bfloat16

    composable-fsdp checkpoint convert runs/1 model.pt --model-only
    """
    kind = Kind(to) if to else _SUFFIXES.get(target.suffix)
    if kind is None:
        raise ConfigurationError(
            f"{target} has no suffix that says its kind. Pass --to with dcp, torch or safetensors."
        )
    left_out = convert(
        source,
        target,
        kind,
        dtype=getattr(torch, dtype) if dtype else None,
        max_file_bytes=max_file_bytes,
        model_only=model_only,
        force=force,
        verify=not no_verify,
        weights_only=not trust,
    )
    if as_json:
        print_json({"target": str(target), "left_out": list(left_out)})
        return
    typer.echo(f"{target} is complete")
    if left_out:
        print_error(f"left out: {', '.join(left_out)}")
