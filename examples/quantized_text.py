"""Train the model of ``train_text.py`` with encoded parameters and gradients, and compare with fp32.

    torchrun --standalone --nproc-per-node 2 examples/quantized_text.py --variants fp32,int8-ef --seeds 0,1

``text/variants.py`` defines the variants. The runs are sequential, ordered by variant and seed. Runs with the same
seed start with the same values and have the same batches. Results are written after every run. The exit code is 1 if
training with int8 and error feedback over at least 300 steps ends more than 1 % from fp32 for any seed, 2 if it could
not start, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from text.convergence import Comparison, Files, Run, percent_apart
from text.data import Corpus, load_corpus
from text.launch import choose_device, from_rank_0, launch
from text.model import Transformer
from text.options import Options, UsageError, add_model_flags, add_training_flags, new_parser, options_from
from text.report import Reporter
from text.sharding import build_sharded_model, make_mesh
from text.training import Trainer, make_optimizer
from text.variants import PLAIN, VARIANTS, traffic_of
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.diagnostics import Meter

CLAIM = "int8-ef"  # the variant whose loss must stay close to that of fp32
ALLOWED = 1.0  # percent
ENOUGH_STEPS = 300  # in earlier steps, losses fall too fast for a comparison


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs: every variant with every seed. ``options`` are the same for all runs, except for the seed."""

    options: Options
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    validate_every: int
    files: Files


@dataclass(frozen=True, slots=True)
class Bench:
    """The objects that all runs share."""

    plan: Plan
    device: torch.device
    mesh: DeviceMesh
    corpus: Corpus
    reporter: Reporter

    def model(self, variant: str, seed: int) -> Transformer:
        return build_sharded_model(self.plan.options, self.mesh, seed=seed, communication=VARIANTS[variant])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, with the defaults of ``make quantized``."""
    parser = new_parser("quantized_text.py", "Train the same model with different codecs, and compare with fp32.")
    run = add_training_flags(parser, steps=ENOUGH_STEPS)
    run.add_argument(
        "--variants",
        type=_variants,
        default="fp32,bf16,int8,int8-ef,int4",
        help=f"in this order, of {', '.join(VARIANTS)}",
    )
    run.add_argument("--seeds", type=_seeds, default="0", help="of the initial parameters and of the batches")
    run.add_argument("--validate-every", type=int, default=100, metavar="N", help="steps between validations")
    add_model_flags(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, default=Path("runs/quantized"), help="folder for the results")
    files.add_argument("--name", default="convergence", help="of the results, which end in .json, .md and .png")
    existing = files.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="keep the results in --out, add what they lack")
    existing.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    return parser


def _variants(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(VARIANTS)}")
    return names


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(seed) for seed in text.split(",")))


def parse_plan(arguments: Sequence[str] | None = None) -> Plan:
    """Return the plan in ``arguments`` (default: the command line). Raises ``UsageError`` for invalid options."""
    values = vars(make_parser().parse_args(arguments))
    variants, seeds, every, name = (values.pop(key) for key in ("variants", "seeds", "validate_every", "name"))
    if every < 1:
        raise UsageError("--validate-every must be at least 1")
    return Plan(options_from(values), variants, seeds, every, Files(values["out"], name))


def run() -> int:
    """Train, report and check. Returns the exit code, the same on every rank."""
    # This program measures messages. Without this, ranks of one host would share memory and send no parameters.
    os.environ.setdefault("COMPOSABLE_FSDP_SHARED_MEMORY", "0")
    plan = parse_plan()
    options = plan.options
    device, reporter = choose_device(options.device), Reporter(dist.get_rank())
    prepare = partial(plan.files.prepare, fresh(plan, device), resume=options.resume, overwrite=options.overwrite)
    comparison = from_rank_0(prepare)
    mesh = make_mesh(options, device, dist.get_world_size())
    bench = Bench(plan, device, mesh, load_corpus(seq=options.seq), reporter)
    tokens = bench.corpus.training.batch("traffic", batch=1, seq=options.seq).to(device).inputs
    for variant in plan.variants:
        comparison.traffic[variant] = traffic_of(bench.model(variant, seed=0), tokens)
    for variant in plan.variants:
        for seed in plan.seeds:
            if not comparison.has(variant, seed):
                comparison.runs.append(train(bench, variant, seed))
                say_outcome(bench, comparison, variant)
            write(bench, comparison)
    reporter.print(comparison.table())
    for name in (plan.files.page, plan.files.data, plan.files.curves):
        reporter.say(f"written: {name}")
    results = checks(comparison)
    for sentence, _ in results:
        reporter.say(sentence)
    return 0 if all(passed for _, passed in results) else 1


def fresh(plan: Plan, device: torch.device) -> Comparison:
    """Return a comparison without runs, with the settings on which losses depend and the machine."""
    options, world_size = plan.options, dist.get_world_size()
    shape = options.shape
    settings: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("steps", "batch", "seq", "lr", "validation_batches")},
        **{name: getattr(shape, name) for name in ("layers", "dim", "heads", "hidden", "tied")},
        "validate_every": plan.validate_every,
        "ranks": world_size,
        "device": device.type,
    }
    command = f"torchrun --standalone --nproc-per-node {world_size} {shlex.join(sys.argv)}"
    origin = {
        "commands": [command],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "torch": torch.__version__,
    }
    return Comparison(settings, origin)


def train(bench: Bench, variant: str, seed: int) -> Run:
    """Train one run from its first step to its last."""
    options = replace(bench.plan.options, seed=seed)
    model = bench.model(variant, seed)
    trainer = Trainer(model, make_optimizer(model, options), options, bench.device)
    line = bench.reporter.progress(f"{variant}, seed {seed}:", options.steps)
    validation = {0: trainer.validate(bench.corpus.validation)}
    meter = Meter(model, options.batch * options.seq * dist.get_world_size())
    speeds: list[float] = []

    def on_report(step: int, loss: float, seconds: float) -> None:
        speeds.append(seconds)
        line(meter.read(step + 1, loss=loss))

    def after_step(done: int) -> None:
        line.show(done)
        if done % bench.plan.validate_every == 0 or done == options.steps:
            with meter.paused():
                validation[done] = trainer.validate(bench.corpus.validation)

    try:
        history = trainer.train(bench.corpus.training, range(options.steps), on_report=on_report, after_step=after_step)
    finally:
        line.close()
    return Run(variant, seed, validation, history.losses, median(speeds))


def say_outcome(bench: Bench, comparison: Comparison, variant: str) -> None:
    """Print the result of the last run, which is the last one of ``variant``."""
    run, traffic = comparison.runs[-1], comparison.traffic[variant]
    others = [pair for pair in comparison.pairs(variant) if pair[0] is run and variant != PLAIN]
    apart = "".join(f", {percent_apart(*pair):+.2f} % to {PLAIN}" for pair in others)
    bench.reporter.say(
        f"{variant}, seed {run.seed}: validation loss {run.validation[0]:.4f} -> {run.final:.4f} nats/byte{apart}; "
        f"{traffic.sent:,} bytes per step and rank, {traffic.plain:,} without codecs"
    )


def write(bench: Bench, comparison: Comparison) -> None:
    """Write the results so far, on one rank."""
    if dist.get_rank() == 0:
        bench.plan.files.write(comparison, [sentence for sentence, _ in checks(comparison)])


def checks(comparison: Comparison) -> list[tuple[str, bool]]:
    """Return for each seed a sentence and whether it is true. After few steps there are no claims."""
    steps = comparison.settings["steps"]
    results = []
    for (run, _), apart in zip(comparison.pairs(CLAIM), comparison.differences(CLAIM), strict=True):
        start = f"{CLAIM} against {PLAIN}, seed {run.seed}"
        if steps < ENOUGH_STEPS:
            results.append((f"{start}: {apart:+.2f} %; not checked with fewer than {ENOUGH_STEPS} steps", True))
        else:
            passed = abs(apart) <= ALLOWED
            results.append(
                (f"{start}: {'ok' if passed else 'FAILED'}; {apart:+.2f} % (allowed {ALLOWED:.0f} %)", passed)
            )
    return results


if __name__ == "__main__":
    sys.exit(launch(run, make_parser))
