"""Ranks that part."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.testing import run_ranks
from tests.transports import IN_COMMON, SOCKETS


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.swapped = False

    def forward(self, x):
        a, b = (self.second, self.first) if self.swapped else (self.first, self.second)
        return b(a(x))


def build(merges=False):
    model = Two()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_max_merged_bytes(0)
    return model


def part(at_step: int):
    model = build()
    x = torch.ones(2, 64)
    t = 0.0
    try:
        for step in range(5):
            model.swapped = step >= at_step and dist.get_rank() == 1
            t = time.time()
            model(x).sum().backward()
    except Exception as e:
        return f"{type(e).__name__} after {time.time() - t:.2f}s at step {step}: {e}"
    return "fine"


def raises(stay: bool):
    model = build()
    x = torch.ones(2, 64)
    t = 0.0
    for step in range(3):
        t = time.time()
        try:
            if step == 2 and dist.get_rank() == 1:
                model.second.register_forward_pre_hook(lambda *_: 1 / 0)
            model(x).sum().backward()
        except Exception as e:
            if dist.get_rank() == 1:
                time.sleep(6)
            return f"{type(e).__name__} after {time.time() - t:.2f}s at step {step}: {e}"


if __name__ == "__main__":
    for env in (SOCKETS, IN_COMMON):
        for s in (0, 3):
            for r in run_ranks(part, 2, s, environment=env):
                print(env, s, r)
        for r in run_ranks(raises, 2, True, environment=env):
            print(env, r)


def raises_in_backward(stay: bool):
    model = build()
    x = torch.ones(2, 64)
    t = 0.0
    for step in range(3):
        t = time.time()
        try:
            y = model(x)
            if step == 2 and dist.get_rank() == 1:
                y.register_hook(lambda *_: 1 / 0)
            y.sum().backward()
        except Exception as e:
            if dist.get_rank() == 1:
                time.sleep(6)
            return f"{type(e).__name__} after {time.time() - t:.2f}s at step {step}: {e}"


def raises_in_backward_late(stay: bool):
    model = build()
    x = torch.ones(2, 64)
    t = 0.0
    for step in range(3):
        t = time.time()
        try:
            if step == 2 and dist.get_rank() == 1:
                model.first.register_forward_hook(lambda m, i, y: (y.register_hook(lambda *_: 1 / 0), None)[1])
            y = model(x)
            y.sum().backward()
        except Exception as e:
            if dist.get_rank() == 1:
                time.sleep(6)
            return f"{type(e).__name__} after {time.time() - t:.2f}s at step {step}: {e}"


def dies(how: int):
    import os

    model = build()
    x = torch.ones(2, 64)
    for step in range(3):
        t = time.time()
        try:
            if step == 2 and dist.get_rank() == 1:
                if how == 0:
                    os.kill(os.getpid(), 9)
                if how == 1:
                    os.kill(os.getpid(), 19)
            model(x).sum().backward()
        except Exception as e:
            print(f"{type(e).__name__} after {time.time() - t:.2f}s at step {step}: {e}", flush=True)
            raise


def recovers(kind: str):

    out = []
    losses = []
    model = build()
    x = torch.ones(2, 64)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        t = time.time()
        handles = []
        if step in (2, 5) and dist.get_rank() == 1:
            if kind == "forward":
                handles.append(model.second.register_forward_pre_hook(lambda *_: 1 / 0))
            if kind == "backward":
                handles.append(
                    model.first.register_forward_hook(lambda m, i, y: (y.register_hook(lambda *_: 1 / 0), None)[1])
                )
            if kind == "order":
                model.swapped = True
        try:
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
        except Exception as e:
            out.append((step, type(e).__name__, round(time.time() - t, 2)))
            t = time.time()
            opt.zero_grad()
            model.reset_iter_state()
            out.append(("reset", round(time.time() - t, 2)))
        model.swapped = False
        for h in handles:
            h.remove()
    return out, losses
