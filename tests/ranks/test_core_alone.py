"""The core trains by itself: a fresh process that has none of the plugins, and no folder but the core's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_program

CORE_ALONE = """
import copy, faulthandler, os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

world, names, store = int(sys.argv[1]), sys.argv[2].split(), sys.argv[3]
ranks = []
for rank in range(world):
    child = os.fork()
    if not child:
        break
    ranks.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.exit(max(map(abs, codes)))

faulthandler.dump_traceback_later(100, exit=True)
spec = PathFinder.find_spec("composable_fsdp", sys.path)
sys.modules["composable_fsdp"] = module_from_spec(spec)  # without running its __init__, which attaches the plugins

import torch, torch.distributed as dist
from torch import nn
from composable_fsdp._api.fully_shard import fully_shard
import composable_fsdp._core.hooks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, 16), nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
shape = (world,) if len(names) == 1 else (world, 1)
mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
torch.manual_seed(0)
model = GPT()
whole = copy.deepcopy(model)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
for step in range(4):
    tokens = torch.randint(64, (2, 9))  # the same on all ranks, so that an average over them is exact
    for accumulated in range(1 + step % 2):
        losses = []
        for each in (model, whole):
            logits = each(tokens[:, :-1])
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            losses[-1].backward()
        assert torch.equal(*losses), (step, losses)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters()):
        assert torch.equal(ours.full_tensor(), theirs), name

loaded = {name.split(".")[1] for name in sys.modules if name.startswith("composable_fsdp.")}
assert loaded <= {"_api", "_core", "_other_names", "errors", "policies", "trace"}, loaded
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize(("world_size", "mesh"), [(1, "shard"), (2, "shard"), (2, "replicate shard")])
def test_the_core_trains_with_nothing_attached(world_size: int, mesh: str, tmp_path: Path) -> None:
    result = run_program(CORE_ALONE, str(world_size), mesh, tmp_path / "store")
    assert result.returncode == 0, result.stderr
