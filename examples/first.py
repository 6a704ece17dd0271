"""A first program: ``torchrun --standalone --nproc-per-node 2 examples/first.py``."""

import torch
from torch import distributed, nn

from composable_fsdp import fully_shard, shutdown

torch.manual_seed(0)  # so that all ranks build the same values
layers = [nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)]
model = nn.Sequential(*layers)
for layer in layers:
    fully_shard(layer)  # each layer is gathered and freed by itself
fully_shard(model)  # takes the remaining parameters; always last
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # gets the shards
rank, device = distributed.get_rank(), next(model.parameters()).device
torch.manual_seed(rank + 1)  # so that each rank has data of its own
for step in range(10):
    loss = model(torch.randn(8, 16, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step} loss {loss.item():.4f}")
shutdown()  # waits for all ranks; an error if one has a batch more
