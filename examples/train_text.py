"""Train a fully sharded transformer on the sources of Python's standard library, and check the results.

    torchrun --standalone --nproc-per-node 2 examples/train_text.py --verify

``text/sharding.py`` shards the model. The run trains, saves a sharded checkpoint shortly before the end, resumes from
it in a fresh model, and with ``--verify`` repeats everything unsharded in one process. It ends with exit code 0 if all
checks hold, 1 if one does not, and 2 if it could not start.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from text.checkpoints import Checkpoints
from text.data import Corpus, load_corpus
from text.launch import choose_device, launch
from text.memory import StepMemory
from text.options import Options, UsageError, make_parser, parse_options
from text.report import Reporter, outcome
from text.sharding import build_sharded_model, compute_dtype, groups_of, make_mesh
from text.training import History, Trainer, is_reported, make_optimizer
from text.verify import allowed_differences, compare_runs, compare_with_reference
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import set_wait_warning
from composable_fsdp.diagnostics import Meter

WARM_UP = 3  # the number of first steps whose memory is not measured
REPEATED_STEPS = 5  # the number of last steps that are trained again from the checkpoint before them


@dataclass(frozen=True, slots=True)
class Run:
    """The objects that all stages of one run share."""

    options: Options
    device: torch.device
    mesh: DeviceMesh
    corpus: Corpus
    checkpoints: Checkpoints
    reporter: Reporter
    start: int

    @property
    def rehearsal(self) -> int:
        """Return the step whose checkpoint is resumed: before the end, and after AdamW has state."""
        return max(self.start, self.options.steps - REPEATED_STEPS, 1)

    def trainer(self, seed: int) -> Trainer:
        model = build_sharded_model(self.options, self.mesh, seed=seed)
        return Trainer(model, make_optimizer(model, self.options), self.options, self.device)


def run() -> int:
    """Train, report and check. Returns the exit code, the same on every rank."""
    options = parse_options()
    world_size = dist.get_world_size()
    options.check_ranks(world_size)
    device = choose_device(options.device)
    checkpoints = Checkpoints(options.out)
    start = checkpoints.prepare(resume=options.resume, overwrite=options.overwrite)
    if start >= options.steps:
        raise UsageError(f"the checkpoint in {options.out} has had {start} steps already: pass --steps above {start}")
    reporter, mesh = Reporter(dist.get_rank()), make_mesh(options, device, world_size)
    job = Run(options, device, mesh, load_corpus(seq=options.seq), checkpoints, reporter, start)
    introduce(job)

    trainer = job.trainer(options.seed)
    if options.resume:
        checkpoints.load(trainer, start)
    groups = groups_of(trainer.model, mesh, options)
    before = trainer.validate(job.corpus.validation)
    history = train(job, trainer)
    after = trainer.validate(job.corpus.validation)
    reporter.say(f"validation loss: {before:.4f} -> {after:.4f} nats/byte")
    curve = options.out / "loss.png"
    reporter.draw_curve(curve, history, before, after)
    reporter.say(f"loss curve: {curve}")
    reporter.show_groups(groups, compute_dtype(options))

    checks = [check_resume(job, trainer, history)]
    if options.verify:
        checks.append(check_reference(job, trainer, history))
    return 0 if all(checks) else 1


def introduce(job: Run) -> None:
    """Print the model, the mesh and the text."""
    axes = " × ".join(
        f"{name} {size}" for name, size in zip(job.mesh.mesh_dim_names or (), job.mesh.shape, strict=True)
    )
    training, validation = job.corpus.training, job.corpus.validation
    job.reporter.say(f"mesh: {axes}, on {job.device.type}; gathers in {compute_dtype(job.options)}")
    job.reporter.say(
        f"text: {len(training.data):,} bytes from {training.files} files to train on, "
        f"{len(validation.data):,} bytes from {validation.files} files to validate on"
    )


def train(job: Run, trainer: Trainer) -> History:
    """Train up to ``--steps`` and save checkpoints."""
    options = job.options
    steps = range(job.start, options.steps)
    line = job.reporter.progress("training", options.steps)
    meter = Meter(trainer.model, options.batch * options.seq * dist.get_world_size())
    meter.start(job.start)
    memory = StepMemory()

    def on_report(step: int, loss: float, seconds: float) -> None:
        line(meter.read(step + 1, loss=loss))

    def after_step(done: int) -> None:
        line.show(done)
        if done == job.start + WARM_UP:
            memory.begin(trainer.model, trainer.optimizer)
        regular = options.save_every and done % options.save_every == 0
        if done == job.rehearsal and dist.get_rank() == 0:  # before the first save, which is no part of a step
            (options.out / "memory.json").write_text(json.dumps({"peak_bytes": memory.peak_bytes()}))
        if regular or done in (job.rehearsal, options.steps):
            with meter.paused():
                job.checkpoints.save(trainer, done)

    try:
        return trainer.train(job.corpus.training, steps, on_report=on_report, after_step=after_step)
    finally:
        line.close()


def check_resume(job: Run, trainer: Trainer, history: History) -> bool:
    """Train the last steps again, in a fresh model, from the checkpoint before them."""
    options = job.options
    fresh = job.trainer(options.seed + 1)  # different initial values, so that only the checkpoint can make it equal
    same_state = job.checkpoints.load(fresh, job.rehearsal)
    again = fresh.train(job.corpus.training, range(job.rehearsal, options.steps))
    found, allowed = compare_runs(trainer.model, history, fresh.model, again), allowed_differences(options)
    equal = "equal" if same_state else "DIFFERENT"
    job.reporter.say(f"resumed at step {job.rehearsal}: parameters and AdamW state {equal} to those saved")
    job.reporter.say(outcome(f"steps {job.rehearsal + 1} to {options.steps} again", found, allowed))
    return same_state and found.within(allowed)


def check_reference(job: Run, trainer: Trainer, history: History) -> bool:
    """Train all steps unsharded, and compare."""
    steps = range(job.options.steps)
    set_wait_warning(None)  # the other ranks wait for rank 0, which trains alone
    line = job.reporter.progress("unsharded", len(steps))

    def on_step(step: int, loss: float) -> None:
        line.show(step + 1, f"loss {loss:.3f}" if is_reported(step, steps) else "")

    try:
        found = compare_with_reference(trainer, history, job.corpus.training, on_step)
    finally:
        line.close()
    allowed = allowed_differences(job.options)
    job.reporter.say(outcome("sharded against unsharded", found, allowed))
    return found.within(allowed)


if __name__ == "__main__":
    sys.exit(launch(run, make_parser))
