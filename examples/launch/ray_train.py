"""Train the model of ``train.py`` by Ray Train, with its checkpoints and its restarts after a failure.

    pip install "ray[train]"
    composable-fsdp doctor && python examples/launch/ray_train.py --out /shared/run --workers 2

On a cluster of several hosts, start ``ray start --head`` on one and ``ray start --address HEAD:6379`` on the others
first, and pass ``--address auto``. The folder ``--out`` must be on storage that all hosts share. Every worker saves its
shards there; the first one reports the checkpoint to Ray, which keeps a copy. After a failure Ray starts all workers
again and gives them the newest checkpoint that was reported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from train import Training

from composable_fsdp import shutdown


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small sharded model by Ray Train.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, shared by all hosts")
    parser.add_argument("--address", help="of a Ray cluster; default: a new one on this machine")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--save-every", type=int, default=5, help="steps from checkpoint to checkpoint")
    parser.add_argument("--fail-at", type=int, default=0, help="step in which a rank raises, in a run from the start")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that raises")
    return parser.parse_args()


def train_worker(options: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialized the process group of all workers."""
    check_ranks()
    rank, training = dist.get_rank(), Training()
    reported = ray.train.get_checkpoint()
    if reported is not None:
        with reported.as_directory() as folder:
            training.load(Path(folder))
    start = training.step
    if rank == 0:
        print(f"{dist.get_world_size()} workers begin after step {start}", flush=True)
    while training.step < options["steps"]:
        if not start and training.step == options["fail_at"] > 0 and rank == options["fail_rank"]:
            raise ValueError(f"--fail-at {options['fail_at']} asked rank {rank} to raise")
        loss = training.advance()
        checkpoint = None
        if training.step % options["save_every"] == 0 or training.step == options["steps"]:
            saved = training.save(options["out"])
            checkpoint = Checkpoint.from_directory(saved) if rank == 0 else None
        ray.train.report({"step": training.step, "loss": loss}, checkpoint=checkpoint)  # on all workers
    shutdown()


def check_ranks() -> None:
    """Run doctor on the ranks of the job, as processes of their own."""
    port = int(os.environ["MASTER_PORT"]) + 1  # that of the job is taken
    environment = os.environ | {"MASTER_PORT": str(port)}
    subprocess.run([sys.executable, "-m", "composable_fsdp", "doctor", "--timeout", "60"], env=environment, check=True)


def main() -> None:
    options = parse_arguments()
    out = options.out.resolve()
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(options.address, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={**vars(options), "out": out / "saved"},
        torch_config=TorchConfig(backend=None if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="run",
            storage_path=str(out),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"done: {result.metrics['step']} steps, loss {result.metrics['loss']!r}")
    print(f"checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
