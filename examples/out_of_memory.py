"""Run out of memory on one rank, halve the microbatches on all ranks, and go on, without a restart.

    torchrun --standalone --nproc-per-node 2 examples/out_of_memory.py

The last rank gets a limit of its address space (``RLIMIT_AS``) before step ``--at``: allocations of the whole batch
fail there. All ranks then meet in ``reset_iter_state``, and repeat the batch in twice as many microbatches. With
``--microbatches 2 --no-limit`` the program begins with small ones: the losses are the same.
"""

from __future__ import annotations

import argparse
import os
import resource

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp import PeerError, fully_shard, shutdown

WIDTH, HIDDEN, BATCH = 64, 4096, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def limit_memory(mebibytes: int) -> None:
    """Let this process map only so much more memory than it has."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (mebibytes << 20), resource.RLIM_INFINITY))


# [step]
def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed. torch's allocator of host memory raises a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def gradients_of(model: nn.Module, batch: Tensor, microbatches: int) -> float:
    """Run forward and backward in ``microbatches`` parts, and return the loss."""
    total = 0.0
    for part in batch.chunk(microbatches):
        loss = model(part).square().mean() / microbatches
        loss.backward()
        total += loss.item()
    return total


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, microbatches: int) -> tuple[float, int]:
    """Return the loss of a step, and the number of microbatches that fit all ranks."""
    while True:
        try:
            loss = gradients_of(model, batch, microbatches)
        except PeerError:  # another rank has failed
            pass
        except Exception as error:
            if not is_out_of_memory(error) or microbatches == len(batch):
                raise
        else:
            optimizer.step()
            optimizer.zero_grad()
            return loss, microbatches
        # Here, after the except clause, the error and the activations that it refers to are freed.
        model.reset_iter_state()  # all ranks meet, and drop what the failed pass has left
        optimizer.zero_grad()  # also the gradients of its first microbatches
        microbatches *= 2


# [main]
def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--at", type=int, default=0, help="the step before which the last rank gets its limit")
    options.add_argument("--mebibytes", type=int, default=160, help="the memory that the last rank may add")
    options.add_argument("--microbatches", type=int, default=1)
    options.add_argument("--no-limit", action="store_true")
    arguments = options.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    fully_shard(model, policy={Block})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    microbatches = arguments.microbatches
    for step in range(arguments.steps):
        if step == arguments.at and not arguments.no_limit and dist.get_rank() == dist.get_world_size() - 1:
            limit_memory(arguments.mebibytes)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss, microbatches = train(model, optimizer, batch, microbatches)
        print(f"rank {dist.get_rank()} step {step} microbatches {microbatches} loss {loss!r}")
    shutdown()


if __name__ == "__main__":
    main()
