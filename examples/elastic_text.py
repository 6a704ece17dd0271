"""Train the model of ``train_text.py`` while ranks are killed at random, and compare with an uninterrupted run.

    torchrun --standalone --nproc-per-node 2 --max-restarts 20 examples/elastic_text.py --kill-every 12 --overwrite

Every few steps a checkpoint is saved: parameters, state of AdamW, random number generators, position in the data. When
a rank is killed, the others raise ``PeerError`` within seconds and end. torchrun then restarts all of them, and they
continue from the newest checkpoint. After the last step, the same steps are trained again without interruption, and
compared bitwise. The exit code is 0 if nothing differs, 1 if something does, and 2 if it could not start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from text.data import load_corpus
from text.interruptions import Journal, Killer, Reader, planned_kill
from text.launch import choose_device, from_rank_0, launch
from text.model import mean_loss
from text.options import Options, UsageError, add_model_flags, add_training_flags, new_parser, options_from
from text.sharding import build_sharded_model, make_mesh
from text.training import Trainer, apply_gradients, is_reported, learning_rate, make_optimizer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import checkpoint

KEPT = 2  # number of kept checkpoints: one is enough, since an old one is deleted only after the next is complete


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the run, and the number of this attempt from 0."""

    options: Options
    save_every: int
    kill_every: int
    attempt: int
    last_attempt: int

    @property
    def folder(self) -> Path:
        return self.options.out / "checkpoints"

    @property
    def journal(self) -> Journal:
        return Journal(self.options.out / "steps.txt")


@dataclass(slots=True)
class Training:
    """A model in training on this rank, and the state for checkpoints. ``losses`` has one value per step."""

    trainer: Trainer
    reader: Reader
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return len(self.losses)

    def advance(self) -> None:
        """Train one step."""
        trainer, batch = self.trainer, self.reader.next().to(self.trainer.device)
        loss = mean_loss(trainer.model(batch.inputs), batch.targets)
        loss.backward()
        apply_gradients(trainer.model, trainer.optimizer, learning_rate(trainer.options, self.step))
        self.losses.append(loss.item())

    def save(self, folder: Path) -> None:
        extra = {"step": self.step, "position": self.reader.position, "losses": self.losses}
        checkpoint.save(folder, self.trainer.model, self.trainer.optimizer, extra, keep_last=KEPT)

    def load(self, folder: Path) -> None:
        extra = checkpoint.load(folder, self.trainer.model, self.trainer.optimizer)
        self.reader.position, self.losses = extra["position"], extra["losses"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, with the defaults of ``make elastic``."""
    parser = new_parser("elastic_text.py", "Train while ranks are killed at random, and compare with a run without.")
    run = add_training_flags(parser, steps=60)
    run.add_argument("--seed", type=int, default=0, help="of the initial parameters, of the data, and of the kills")
    run.add_argument("--save-every", type=int, default=5, metavar="N", help="save a checkpoint every N steps")
    run.add_argument("--kill-every", type=int, default=12, metavar="N", help="kill a rank every N steps; 0: never")
    add_model_flags(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, default=Path("runs/elastic"), help="folder for checkpoints")
    files.add_argument("--overwrite", action="store_true", help="delete what an earlier run left in --out")
    return parser


def parse_plan() -> Plan:
    """Return the plan from the command line and torchrun's variables. Raises ``UsageError`` for invalid options."""
    values: dict[str, Any] = vars(make_parser().parse_args())
    save_every, kill_every = values["save_every"], values.pop("kill_every")
    if save_every < 1 or kill_every < 0:
        raise UsageError("--save-every must be at least 1, and --kill-every must not be negative")
    attempt, last = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return Plan(options_from(values), save_every, kill_every, attempt, last)


def prepare(plan: Plan) -> None:
    """Make an empty folder in the first attempt. Later attempts use its contents."""
    out = plan.options.out
    if plan.attempt:
        return
    if out.exists() and any(out.iterdir()):
        if not plan.options.overwrite:
            raise UsageError(
                f"{out} is not empty: pass --overwrite to delete what is in it, or another folder as --out"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def run() -> int:
    """Train to the end, over any number of attempts, and compare. Returns the exit code, the same on every rank."""
    plan = parse_plan()
    from_rank_0(lambda: prepare(plan))
    options, rank, size = plan.options, dist.get_rank(), dist.get_world_size()
    device, corpus = choose_device(options.device), load_corpus(seq=options.seq)
    mesh = make_mesh(options, device, size)

    def begin() -> Training:
        model = build_sharded_model(options, mesh, seed=options.seed)
        reader = Reader(
            corpus.training, seed=options.seed, rank=rank, world_size=size, batch=options.batch, seq=options.seq
        )
        torch.manual_seed(options.seed + rank)
        return Training(Trainer(model, make_optimizer(model, options), options, device), reader)

    training = begin()
    train_in_spite_of_kills(plan, training)
    undisturbed = begin()
    while undisturbed.step < options.steps:
        undisturbed.advance()
    losses = [each.trainer.validate(corpus.validation) for each in (training, undisturbed)]
    return report(plan, equal(training, undisturbed, mesh), *losses)


def train_in_spite_of_kills(plan: Plan, training: Training) -> None:
    """Continue from the newest checkpoint to the last step, unless a kill ends the attempt."""
    options, rank = plan.options, dist.get_rank()
    if checkpoint.latest(plan.folder) is not None:
        training.load(plan.folder)
    say(f"attempt {plan.attempt + 1} begins after step {training.step}")
    restarts_left = plan.attempt < plan.last_attempt
    every = plan.kill_every if restarts_left else 0
    killer = Killer(planned_kill(options.seed, plan.attempt, training.step, every, dist.get_world_size()), rank)
    steps = range(training.step, options.steps)
    for step in steps:
        killer.begin_step(step)
        training.advance()
        if rank == 0:
            plan.journal.note(step)
        if is_reported(step, steps):
            say(f"step {training.step} of {options.steps}: loss {training.losses[-1]:.3f} on rank 0")
        if training.step % plan.save_every == 0 or training.step == options.steps:
            training.save(plan.folder)


def equal(training: Training, undisturbed: Training, mesh: DeviceMesh) -> bool:
    """Return whether the losses of all steps and the parameters are bitwise equal on every rank."""
    pairs = zip(training.trainer.model.parameters(), undisturbed.trainer.model.parameters(), strict=True)
    same = training.losses == undisturbed.losses and all(torch.equal(_local(a), _local(b)) for a, b in pairs)
    different = torch.tensor(0 if same else 1, device=mesh.device_type)
    dist.all_reduce(different)
    return different.item() == 0


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def report(plan: Plan, same: bool, loss: float, expected: float) -> int:
    """Print the result and return the exit code."""
    done = from_rank_0(plan.journal.steps)
    redone = len(done) - len(set(done))
    say(f"restarts: {plan.attempt}; steps done: {len(done)}, of which again: {redone}")
    say(f"validation loss in nats/byte: {loss!r}; of the undisturbed run: {expected!r}")
    passed = same and loss == expected
    say(f"losses of all {plan.options.steps} steps, and parameters: {'the same bits' if same else 'DIFFERENT'}")
    return 0 if passed else 1


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(launch(run, make_parser))
