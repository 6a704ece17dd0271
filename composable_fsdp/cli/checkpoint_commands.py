"""``checkpoint``: inspects checkpoints, and converts them to safetensors.

Commands import what they need when they run: the help and the version of the command need no torch.
"""

from __future__ import annotations

from pathlib import Path

from composable_fsdp._text import count
from composable_fsdp.cli import printing


def add_commands(commands: printing.Commands) -> None:
    text = "Inspect checkpoints, and convert them to safetensors."
    group = commands.add_parser("checkpoint", help=text, description=text, allow_abbrev=False)
    verbs = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    source = "a checkpoint of save or of torch.distributed.checkpoint, or a folder of them"
    parser = printing.add_command(verbs, "inspect", _inspect, has_json=True)
    parser.add_argument("path", type=Path, help=source)
    parser.add_argument("--verify", action="store_true", help="compare checksums too, which reads all files")
    parser = printing.add_command(verbs, "convert", _convert)
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="a directory for safetensors")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the model's floating-point tensors")


def _inspect(path: Path, verify: bool, as_json: bool) -> None:
    """Show the tensors, step, versions and files of a checkpoint, or of the newest one in a folder.

    Exit code 1 if a file is missing or damaged. Without --verify only sizes are compared with the manifest.

    Example: composable-fsdp checkpoint inspect runs/1 --verify
    """
    from composable_fsdp.checkpoint._convert import describe

    found = describe(path, verify=verify)
    if as_json:
        printing.show_json(found)
        return
    rows = [(each["name"], " × ".join(map(str, each["shape"])) or "scalar", each["dtype"]) for each in found["tensors"]]
    printing.show(f"{found['path']}\n{printing.text_table(('tensor', 'shape', 'dtype'), rows, ())}")
    if (files := found["files"]) is not None:
        versions = f"composable_fsdp {found['library']}, torch {found['torch']}"
        printing.show(f"step {found['step']}, saved by {count(found['ranks'], 'rank')} with {versions}")
        printing.show(f"{count(len(files), 'file')}, {sum(files.values())} bytes")
    if verify:
        printing.show("all files have the checksums of the manifest")


def _convert(source: Path, target: Path, dtype: str | None) -> None:
    """Write the model of a checkpoint, after a comparison of its checksums, to safetensors, with all tensors in memory.

    Optimizer state and extra are left out.

    Example: composable-fsdp checkpoint convert runs/1 export --dtype bfloat16
    """
    import torch

    from composable_fsdp.checkpoint._convert import convert

    convert(source, target, dtype=getattr(torch, dtype) if dtype else None)
    printing.show(f"{target} is complete")
