"""A user-defined codec for parameters and gradients.

torchrun --standalone --nproc-per-node 2 examples/own_codec.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import CommunicationPolicy, fully_shard, shutdown
from composable_fsdp.trace import Operation, Recorder


@dataclass(frozen=True)
class Affine8:
    """Encodes values as bytes between the smallest and the largest of their row, which precede them as two floats."""

    def payload_bytes(self, numel: int) -> int:
        return 8 + numel

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        low, high = torch.aminmax(rows.float(), dim=1, keepdim=True)
        step = ((high - low) / 255).clamp_min(1e-30)
        values = ((rows - low) / step).round().to(torch.uint8)
        return torch.cat([torch.cat([low, step], dim=1).view(torch.uint8), values], dim=1)

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        low, step = payload[:, :8].contiguous().view(torch.float32).split(1, dim=1)
        return payload[:, 8:].float() * step + low


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    fully_shard(model, comm_policy=CommunicationPolicy(all_gather=Affine8(), reduce_scatter=Affine8()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(100):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 33 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    with Recorder() as recorder:
        model(x).sum().backward()
    if dist.get_rank() == 0:
        messages = [event for event in recorder if event.operation in (Operation.UNSHARD, Operation.REDUCE)]
        nbytes, plain = sum(each.bytes for each in messages), sum(each.plain_bytes for each in messages)
        print(f"messages of a step: {nbytes:,} bytes, without the codec {plain:,}, ratio {nbytes / plain:.2f}")
    shutdown()


if __name__ == "__main__":
    main()
