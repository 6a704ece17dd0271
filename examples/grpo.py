"""Train a policy by reinforcement learning: GRPO (Shao et al. 2024), with an unsharded sampler on each rank.

    torchrun --standalone --nproc-per-node 2 examples/grpo.py

In each step the sampler gets the policy's full weights (``stream_full_params``) and completes prompts, groups of
completions are rewarded, and the sharded policy learns from them. The reference of the KL term is sharded as the
policy, and gets its weights by ``copy_params``. The policy is the small GPT of ``own_gpt.py``; the reward of a
completion is its share of lower-case letters, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from own_gpt import GPT, Block
from torch import Tensor, nn

from composable_fsdp import clip_grad_norm_, copy_params, fully_shard, initialize, shutdown, stream_full_params

PROMPT, LENGTH, PROMPTS, GROUP = 4, 12, 4, 8
"""Bytes of a prompt and of a completion; prompts of a rank in a step, and completions of each prompt."""


# [models]
def sharded_model() -> nn.Module:
    with torch.device("meta"):
        model = GPT()
    fully_shard(model, policy={Block})
    return initialize(model, seed=0)


def push(policy: nn.Module, sampler: nn.Module) -> None:
    """Copy the policy's full weights to the sampler of this rank. All ranks call it."""
    with torch.no_grad():
        for bucket in stream_full_params(policy):
            for name, tensor in bucket.items():
                sampler.get_parameter(name).copy_(tensor)


# [sample]
@torch.no_grad()
def complete(sampler: nn.Module, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Sample completions. The sampler is not sharded, so ranks may sample differently many tokens."""
    tokens = prompts
    for _ in range(LENGTH):
        likely = sampler(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1, generator=generator)], dim=1)
    return tokens


def reward_of(tokens: Tensor) -> Tensor:
    """Return the share of lower-case letters in each completion."""
    completion = tokens[:, PROMPT:]
    return ((completion >= ord("a")) & (completion <= ord("z"))).float().mean(dim=1)


# [learn]
def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token of the completions. It gathers parameters, so all ranks call it."""
    logits = model(tokens[:, :-1])[:, PROMPT - 1 :].log_softmax(dim=-1)
    return logits.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def loss_of(new: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    divergence = (reference - new).exp() - (reference - new) - 1
    return (0.01 * divergence - gain).mean()


# [main]
def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--refresh", type=int, default=10, help="steps after which the reference gets new weights")
    arguments = options.parse_args()

    # [setup]
    policy, reference = sharded_model(), sharded_model()
    device = next(policy.parameters()).device
    sampler = GPT().to(device).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(rank)  # each rank has prompts of its own

    # [loop]
    for step in range(arguments.steps):
        if step % arguments.refresh == 0:
            copy_params(policy, reference)
        push(policy, sampler)
        prompts = torch.randint(256, (PROMPTS, PROMPT), generator=generator, device=device)
        tokens = complete(sampler, prompts.repeat_interleave(GROUP, dim=0), generator)
        rewards = reward_of(tokens)
        groups = rewards.view(PROMPTS, GROUP)
        advantage = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old, fixed = log_likelihood(policy, tokens), log_likelihood(reference, tokens)
        for _ in range(2):  # updates from the same completions
            loss = loss_of(log_likelihood(policy, tokens), old, fixed, advantage.view(-1, 1))
            loss.backward()
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = rewards.mean()
        dist.all_reduce(mean)
        if rank == 0 and (step % 5 == 0 or step == arguments.steps - 1):
            print(f"step {step} reward {mean.item() / ranks:.3f}")
    shutdown()


if __name__ == "__main__":
    main()
