"""``checkpoint convert``: conversion of checkpoints to safetensors.

The command imports what it needs when it runs: the help and the version of the command need no torch.
"""

from __future__ import annotations

from pathlib import Path

from composable_fsdp.cli import printing


def add_commands(commands: printing.Commands) -> None:
    text = "Convert checkpoints to safetensors."
    group = commands.add_parser("checkpoint", help=text, description=text, allow_abbrev=False)
    verbs = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = printing.add_command(verbs, "convert", _convert)
    source = "a checkpoint of save or of torch.distributed.checkpoint, or a folder of them"
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="a directory for safetensors")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the model's floating-point tensors")


def _convert(source: Path, target: Path, dtype: str | None) -> None:
    """Write the model of a checkpoint, after a comparison of its checksums, to safetensors, with all tensors in memory.

    Optimizer state and extra are left out.

    Example: composable-fsdp checkpoint convert runs/1 export --dtype bfloat16
    """
    import torch

    from composable_fsdp.checkpoint._convert import convert

    convert(source, target, dtype=getattr(torch, dtype) if dtype else None)
    printing.show(f"{target} is complete")
