"""GRPO whose completions come from another process, which is sent only the weights that changed.

    torchrun --standalone --nproc-per-node 2 examples/grpo_engine.py

The first rank starts the process that generates, and sends it flushes (``stream_changed_params``) and prompts over a
pipe. The process writes the flushes into its bf16 model (``apply_changes``). If it refuses one, or is a new process
(``--kill-at``), it is sent everything. At the end its weights are compared with a full stream. Policy, reward and loss
are those of ``grpo.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from grpo import GROUP, LENGTH, PROMPT, PROMPTS, complete, log_likelihood, loss_of, reward_of, sharded_model
from own_gpt import GPT
from torch import Tensor, nn

from composable_fsdp import clip_grad_norm_, shutdown, stream_changed_params, stream_full_params
from composable_fsdp.errors import FlushError
from composable_fsdp.plugins.weight_stream import Flush, Position, SentParams, apply_changes


# [engine]
def engine(pipe: Any) -> None:
    """Generate, in a process of its own, until the pipe is closed."""
    model = GPT().bfloat16().eval().requires_grad_(False)
    state, generator = dict(model.named_parameters()), torch.Generator().manual_seed(1)
    position: Position | None = None
    while True:
        try:
            kind, content = pipe.recv()
        except EOFError:
            return
        if kind == "flush":
            try:
                position = apply_changes(state, Flush.from_bytes(content), position)
                pipe.send("applied")
            except FlushError as error:  # lost, damaged, or the first one of a new process
                pipe.send(str(error))
        elif kind == "complete":
            assert position is not None
            assert position.is_complete, "weights of two steps"
            pipe.send(complete(model, content, generator))
        else:
            pipe.send({name: checksum(value) for name, value in state.items()})


def checksum(value: Tensor) -> int:
    return crc32(value.detach().view(-1).view(torch.uint8).numpy().data)


class Engine:
    """The first rank's connection to the process that generates."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=engine, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def ask(self, kind: str, content: object = None) -> Any:
        self._pipe.send((kind, content))
        return self._pipe.recv()


# [push]
def push(policy: nn.Module, sent: SentParams, running: Engine | None) -> int:
    """Send what changed, and all of it if the engine has lost something. All ranks call it. Return the bytes."""
    for _ in range(2):
        refused, nbytes = 0, 0
        for flush in stream_changed_params(policy, sent, dtype=torch.bfloat16, rank0_only=True):
            if running is not None:  # the first rank
                nbytes += flush.nbytes
                refused |= running.ask("flush", flush.to_bytes()) != "applied"
        everywhere = torch.tensor(refused)
        dist.broadcast(everywhere, 0)
        if not everywhere:
            return nbytes
        sent.forget()
    raise RuntimeError("the engine refuses full weights too: look at its messages")


# [main]
def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--lr", type=float, default=1e-3, help="of fine-tuning, 1e-6: then few values change")
    options.add_argument("--kill-at", type=int, default=-1, help="the step before which the engine is killed")
    arguments = options.parse_args()
    policy, sent = sharded_model(), SentParams()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=arguments.lr)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    running = Engine() if rank == 0 else None
    generator = torch.Generator().manual_seed(0)  # the same prompts on all ranks
    for step in range(arguments.steps):
        if step == arguments.kill_at and running is not None:
            running.process.kill()
            running = Engine()
        nbytes = push(policy, sent, running)
        prompts = torch.randint(256, (ranks * PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, dim=0)
        tokens = torch.empty(len(prompts), PROMPT + LENGTH, dtype=torch.int64)
        if running is not None:
            tokens = running.ask("complete", prompts)
        dist.broadcast(tokens, 0)
        tokens = tokens.chunk(ranks)[rank]
        rewards = reward_of(tokens)
        groups = rewards.view(PROMPTS, GROUP)
        advantage = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old = log_likelihood(policy, tokens)
        for _ in range(2):
            loss_of(log_likelihood(policy, tokens), old, old, advantage.view(-1, 1)).backward()
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = rewards.mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} reward {mean.item() / ranks:.3f} bytes {nbytes}")
    push(policy, sent, running)
    expected = {}
    for bucket in stream_full_params(policy, dtype=torch.bfloat16, rank0_only=True):
        expected |= {name: checksum(tensor) for name, tensor in bucket.items()}
    is_same = running is None or running.ask("checksums") == expected
    if running is not None:
        print("the engine has the weights of the policy" if is_same else "the engine has OTHER weights")
        running.process.kill()
    shutdown()
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
