"""A tensor class that defines how its values are sent.

torchrun --standalone --nproc-per-node 2 examples/own_tensor.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard, shutdown


class RowInt8(torch.Tensor):
    """Stores fp32 values. They are sent as int8 with one scale per row.

    Operations such as ``chunk`` and ``copy_`` keep the class, as ``torch.Tensor`` does for its subclasses.
    """

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        shard = self.as_subclass(torch.Tensor)
        scale = shard.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return ((shard / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        values, scale = outputs
        full = values.to(param_dtype) * scale.to(param_dtype)
        if out is None:
            return full, (full,)  # the parameter, and the tensors that own its memory
        out.copy_(full)
        return None


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(RowInt8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(100):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 33 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    local = model[0].weight.to_local()
    print(f"rank {dist.get_rank()} holds a {type(local).__name__} of {tuple(local.shape)}")
    shutdown()


if __name__ == "__main__":
    main()
