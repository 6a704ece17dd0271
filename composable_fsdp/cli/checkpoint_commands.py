"""``checkpoint``: inspects, verifies and converts checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

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
from composable_fsdp.cli import printing
from composable_fsdp.errors import ConfigurationError

__all__ = ["add_commands"]

_SUFFIXES = {".pt": Kind.TORCH, ".pth": Kind.TORCH, ".bin": Kind.TORCH, ".ckpt": Kind.TORCH}


def add_commands(commands: printing.Commands) -> None:
    text = "Inspect, verify and convert checkpoints."
    group = commands.add_parser("checkpoint", help=text, description=text, allow_abbrev=False)
    verbs = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    source = "a checkpoint of any kind, or a folder of them"

    parser = printing.add_command(verbs, "inspect", _inspect, has_json=True)
    parser.add_argument("path", type=Path, help=source)
    parser.add_argument("--verify", action="store_true", help="compare checksums too, which reads all files")

    parser = printing.add_command(verbs, "convert", _convert, has_json=True)
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="a directory, or a file with --to torch")
    parser.add_argument("--to", choices=("dcp", "torch", "safetensors"), help="torch if TARGET is a .pt file")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the model's floating-point tensors")
    parser.add_argument(
        "--max-file-bytes", type=int, default=MAX_FILE_BYTES, help="bytes per file of safetensors (%(default)s)"
    )
    parser.add_argument("--model-only", action="store_true", help="leave out the optimizer and the rest")
    parser.add_argument("--force", action="store_true", help="replace an existing file, or safetensors")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums of SOURCE first")
    parser.add_argument("--trust", action="store_true", help="admit any class, which can run any code in SOURCE")


# -- inspect


def _inspect(path: Path, verify: bool, as_json: bool) -> int:
    """Show the contents of a checkpoint, or the checkpoints in a folder, and which files are missing or damaged.

    Exit code 1 if one is. Without --verify only sizes of files are compared with the manifest.

    Example: composable-fsdp checkpoint inspect runs/1 --verify
    """
    is_folder = kind_of(path) is Kind.FOLDER
    found = describe_folder(path, verify=verify) if is_folder else describe(path, verify=verify)
    if as_json:
        printing.show_json(asdict(found))
    elif isinstance(found, FolderDescription):
        _show_folder(found)
    else:
        _show(found)
    problems = [each.problem for each in found.checkpoints] if isinstance(found, FolderDescription) else found.problems
    if verify and not any(problems) and not as_json:
        printing.show("all files have the checksums of the manifest")
    return int(any(problems))


def _show_folder(found: FolderDescription) -> None:
    rows = []
    for each in found.checkpoints:
        marks = ["newest"] if each.name == found.newest else []
        marks += ["newest intact"] if each.name == found.newest_intact != found.newest else []
        note = "; ".join([*marks, each.problem] if each.problem else marks)
        numbers = (str(each.ranks), printing.size_text(each.nbytes)) if each.ranks else ("", "")
        rows.append((str(each.step), each.name, *numbers, note))
    printing.show(found.path)
    printing.show(printing.text_table(("step", "name", "ranks", "size", ""), rows, ()))
    if found.leftovers:
        printing.show(f"left by killed saves, the next one removes it: {', '.join(found.leftovers)}")


def _show(found: Description) -> None:
    printing.show(f"{found.path} ({found.kind})")
    rows = []
    for tensor in found.tensors:
        size = f"as {tensor.same_as}" if tensor.same_as else printing.size_text(tensor.nbytes)
        rows.append((tensor.name, " × ".join(map(str, tensor.shape)) or "scalar", tensor.dtype, size))
    printing.show(printing.text_table(("tensor", "shape", "dtype", "size"), rows, ("size",)))
    printing.show("\n".join(_summary(found)))


def _summary(found: Description) -> list[str]:
    own = [tensor for tensor in found.tensors if tensor.same_as is None]
    tied = f", {len(found.tensors) - len(own)} more tied to these" if len(own) < len(found.tensors) else ""
    size = printing.size_text
    lines = [f"model: {printing.count(len(own), 'tensor')}{tied}, {size(sum(tensor.nbytes for tensor in own))}"]
    if found.optimizer:
        lines.append(f"optimizer: state of {printing.count(found.optimizer, 'parameter')}")
    lines += [f"{name}: {size(nbytes) if nbytes else 'no tensors'}" for name, nbytes in found.others.items()]
    if found.saved:
        saved = found.saved
        versions = f"composable_fsdp {saved['library']}, torch {saved['torch']}"
        lines.append(f"step {saved['step']}, saved by {printing.count(saved['ranks'], 'rank')} with {versions}")
    return [*lines, f"all tensors: {size(found.nbytes)}", *(f"damaged: {problem}" for problem in found.problems)]


# -- convert


def _convert(
    source: Path,
    target: Path,
    to: str | None,
    dtype: str | None,
    max_file_bytes: int,
    model_only: bool,
    force: bool,
    no_verify: bool,
    trust: bool,
    as_json: bool,
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
        printing.show_json({"target": str(target), "left_out": list(left_out)})
        return
    printing.show(f"{target} is complete")
    if left_out:
        printing.show_error(f"left out: {', '.join(left_out)}")
