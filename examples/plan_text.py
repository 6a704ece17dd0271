"""Plan the training of ``train_text.py`` with the same options, and compare its peak with the one that was measured.

    python examples/plan_text.py --ranks 2 --out runs/demo --layers 4

It runs in one process, without the model's memory, and writes the plan as ``plan.txt`` beside the loss curve.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys

import torch
from text.model import Block, Transformer, mean_loss
from text.options import UsageError, make_parser, options_from

from composable_fsdp import MixedPrecisionPolicy
from composable_fsdp.plan import plan


def main() -> int:
    ranks = argparse.ArgumentParser(add_help=False)
    ranks.add_argument("--ranks", type=int, default=2)
    given, rest = ranks.parse_known_args()
    try:
        options = options_from(vars(make_parser().parse_args(rest)))
        options.check_ranks(given.ranks)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    made = plan(
        lambda: Transformer(options.shape, options.seq),
        f"{options.batch}x{options.seq}",
        mesh=f"{options.hybrid}x{given.ranks // options.hybrid}",
        device="cpu",
        optimizer=functools.partial(torch.optim.AdamW, fused=True),
        loss=lambda logits: mean_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64)),
        recompute=options.activation_checkpointing,
        policy={Block},
        reshard_after_forward=options.reshard,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy(),
    )
    (options.out / "plan.txt").write_text(f"{made}\n")
    print(f"loss curve: {options.out / 'loss.png'}")
    measured = options.out / "memory.json"
    peak = json.loads(measured.read_text())["peak_bytes"] if measured.exists() else None
    text = "not measured" if peak is None else f"{peak / 1e6:.1f} MB measured, {made.peak_bytes / peak:.2f} of it"
    print(f"peak of a rank in a step: {made.peak_bytes / 1e6:.1f} MB planned, {text}; plan: {options.out / 'plan.txt'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
