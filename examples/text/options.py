"""The command line as frozen values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from .model import ModelShape


class UsageError(Exception):
    """An error that the user can correct. All ranks raise it together, so that no rank waits for another."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the user.

    Invariant: every value is valid by itself; ``check_ranks`` compares it with the number of ranks.
    """

    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    validation_batches: int
    device: str
    bf16: bool
    hybrid: int
    reshard: bool | int | None
    cpu_offload: bool
    activation_checkpointing: bool
    out: Path
    save_every: int
    resume: bool
    overwrite: bool
    verify: bool
    shape: ModelShape = field(repr=False)

    def __post_init__(self) -> None:
        shape = self.shape
        problems = {
            "--steps must be at least 2: a checkpoint is saved before the last one": self.steps < 2,
            "--lr must be above 0": self.lr <= 0,
            "--verify compares all steps from the first one on: leave out --resume": self.verify and self.resume,
            "--save-every must not be negative": self.save_every < 0,
            f"--heads {shape.heads} must cut --dim {shape.dim} into even parts": shape.dim % (2 * shape.heads) != 0,
        }
        for sentence, applies in problems.items():
            if applies:
                raise UsageError(sentence)

    def check_ranks(self, world_size: int) -> None:
        """Raise ``UsageError`` if the options do not fit ``world_size`` ranks."""
        if world_size % self.hybrid:
            raise UsageError(
                f"--hybrid {self.hybrid} does not divide the {world_size} ranks: "
                f"choose a divisor of {world_size}, or start another number of ranks"
            )
        shard_size = world_size // self.hybrid
        if isinstance(self.reshard, bool) or self.reshard is None:
            return
        if self.reshard < 2 or shard_size % self.reshard:
            raise UsageError(
                f"--reshard {self.reshard} does not divide the {shard_size} ranks that share one copy of the model: "
                f"choose a divisor of {shard_size} above 1, or --reshard false to keep all parameters after forward"
            )


class _Parser(argparse.ArgumentParser):
    """Reports an invalid command line as ``UsageError``, so that one rank prints it instead of all ranks at once."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all flags)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _reshard(text: str) -> bool | int | None:
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of true, false, none, or a number of ranks") from None


def new_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser without flags."""
    return _Parser(
        prog=program,
        description=description,
        epilog=f"start it with: torchrun --standalone --nproc-per-node 2 examples/{program}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def add_training_flags(parser: argparse.ArgumentParser, *, steps: int) -> argparse._ArgumentGroup:
    """Add the options of training, except for seeds. ``steps`` is the default number of steps."""
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=_positive, default=steps, help="optimizer steps, at least 2")
    run.add_argument("--batch", type=_positive, default=4, help="sequences per rank and step")
    run.add_argument("--seq", type=_positive, default=128, help="bytes per sequence")
    run.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW after the warm-up")
    run.add_argument("--validation-batches", type=_positive, default=16, help="batches per rank in each validation")
    run.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is the accelerator, or cpu without one")
    return run


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of the model."""
    shape = parser.add_argument_group("model")
    shape.add_argument("--layers", type=_positive, default=6)
    shape.add_argument("--dim", type=_positive, default=384)
    shape.add_argument("--heads", type=_positive, default=6)
    shape.add_argument("--hidden", type=_positive, default=1024, help="width inside the feed-forward part")
    head = shape.add_mutually_exclusive_group()
    head.add_argument("--tied", action="store_true", default=True, help="the embedding is the output head too")
    head.add_argument(
        "--untied", dest="tied", action="store_false", default=argparse.SUPPRESS, help="the head has its own weights"
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, with the defaults of ``make demo``."""
    parser = new_parser(
        "train_text.py", "Train a byte-level transformer on the sources of Python's standard library, fully sharded."
    )
    run = add_training_flags(parser, steps=100)
    run.add_argument("--seed", type=int, default=0, help="of the initial parameters and of the batches")
    add_model_flags(parser)

    shard = parser.add_argument_group("sharding")
    shard.add_argument(
        "--bf16",
        action="store_true",
        help="gather and compute in bfloat16, reduce in float32; slow on CPUs without bfloat16 units",
    )
    shard.add_argument(
        "--hybrid",
        type=_positive,
        default=1,
        metavar="R",
        help="R copies of the model, each sharded over world/R ranks",
    )
    shard.add_argument(
        "--reshard",
        type=_reshard,
        default="none",
        metavar="{true,false,none,N}",
        help="free full parameters after forward: always, never, all but the root's, or keep 1/N of them",
    )
    shard.add_argument("--cpu-offload", action="store_true", help="keep shards, gradients and AdamW on the CPU")
    shard.add_argument("--activation-checkpointing", action="store_true", help="recompute each block in backward")

    files = parser.add_argument_group("files and checks")
    files.add_argument("--out", type=Path, default=Path("runs/train_text"), help="folder for checkpoints and the curve")
    files.add_argument("--save-every", type=int, default=0, metavar="N", help="also save every N steps; 0: do not")
    existing = files.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    existing.add_argument("--overwrite", action="store_true", help="delete the checkpoints that lie in --out first")
    files.add_argument(
        "--verify",
        action="store_true",
        help="train the same steps unsharded too, and compare; a rate at which training is unstable, like 1e-3, fails",
    )
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Return the options in ``arguments`` (default: the command line). Raises ``UsageError`` for invalid options."""
    return options_from(vars(make_parser().parse_args(arguments)))


def options_from(values: dict[str, Any]) -> Options:
    """Return options from flags by name. Missing flags have the defaults of ``make_parser``."""
    chosen = {**vars(make_parser().parse_args([])), **values}
    shape = ModelShape(**{each.name: chosen.pop(each.name) for each in fields(ModelShape) if each.name in chosen})
    return Options(shape=shape, **chosen)
