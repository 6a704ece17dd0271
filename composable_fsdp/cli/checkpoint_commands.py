"""``checkpoint``: inspects and verifies checkpoints, and converts them to safetensors.

Commands import what they need when they run: the help and the version of the command need no torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from composable_fsdp.cli import printing
from composable_fsdp.errors import ConfigurationError

if TYPE_CHECKING:
    from composable_fsdp.checkpoint._tools import Description

_MAX_FILE_BYTES = 5 * 10**9


def add_commands(commands: printing.Commands) -> None:
    text = "Inspect and verify checkpoints, and convert them to safetensors."
    group = commands.add_parser("checkpoint", help=text, description=text, allow_abbrev=False)
    verbs = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    source = "a checkpoint of save or of torch.distributed.checkpoint, or a folder of them"

    parser = printing.add_command(verbs, "inspect", _inspect, has_json=True)
    parser.add_argument("path", type=Path, help=source)
    parser.add_argument("--verify", action="store_true", help="compare checksums too, which reads all files")

    parser = printing.add_command(verbs, "convert", _convert, has_json=True)
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="a directory for safetensors")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the model's floating-point tensors")
    sizes = "bytes per file of safetensors (%(default)s)"
    parser.add_argument("--max-file-bytes", type=int, default=_MAX_FILE_BYTES, help=sizes)
    parser.add_argument("--force", action="store_true", help="replace existing safetensors")


# -- inspect


def _inspect(path: Path, verify: bool, as_json: bool) -> int:
    """Show the contents of a checkpoint, or of the newest one in a folder, and which files are missing or damaged.

    Exit code 1 if one is. Without --verify only sizes of files are compared with the manifest.

    Example: composable-fsdp checkpoint inspect runs/1 --verify
    """
    from composable_fsdp.checkpoint._tools import describe

    found = describe(path, verify=verify)
    if as_json:
        printing.show_json(asdict(found))
    else:
        _show(found)
    if verify and not found.problems and not as_json:
        printing.show("all files have the checksums of the manifest")
    return int(bool(found.problems))


def _show(found: Description) -> None:
    printing.show(found.path)
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


def _convert(source: Path, target: Path, dtype: str | None, max_file_bytes: int, force: bool, as_json: bool) -> None:
    """Write the model of a checkpoint to safetensors, with all tensors in memory.

    Example: composable-fsdp checkpoint convert runs/1 export --dtype bfloat16
    """
    if target.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise ConfigurationError(
            f"convert writes safetensors only, to a directory, not {target}. Between directories of checkpoints and "
            "files of torch.save, torch converts: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            "SOURCE TARGET, or torch_to_dcp."
        )
    import torch

    from composable_fsdp.checkpoint._tools import convert

    dtypes = getattr(torch, dtype) if dtype else None
    left_out = convert(source, target, dtype=dtypes, max_file_bytes=max_file_bytes, force=force)
    if as_json:
        printing.show_json({"target": str(target), "left_out": list(left_out)})
        return
    printing.show(f"{target} is complete")
    if left_out:
        printing.show_error(f"left out: {', '.join(left_out)}")
