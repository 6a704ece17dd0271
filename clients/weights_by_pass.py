"""Gather quantized weights as Transformer Engine's tensors do: by the state that FSDP2 keeps of the module.

Transformer Engine sends a weight that is quantized by rows in forward, and by columns in backward. If the weight stays
unsharded after forward, one all-gather has to serve both. Therefore ``fsdp_pre_all_gather`` reads the training state of
the module's parameter group, and ``_reshard_after_forward``. Here both forms are quantized by rows, with different
scales: without Transformer Engine's kernels nothing multiplies by columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from models import blocks, vectors
from outcome import STEPS, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

SENT: list[str] = []
"""The quantizations that all-gathers have sent, in order."""
KEPT = ("detach", "_to_copy", "clone", "new_zeros", "slice", "split", "view", "as_strided", "copy_", "empty_like")


def quantized(weight: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` as int8 numbers of at most ``largest``, and the scale of each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / largest
    return (weight / scale).round().to(torch.int8), scale


class Weight(torch.Tensor):
    """A weight that is sent as 8 bits in forward, and as 6 bits in backward."""

    @staticmethod
    def __new__(cls, high: torch.Tensor) -> "Weight":
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, strides=high.stride())

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> "Weight":
        return cls(inner["high"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(Weight, lambda each: each.high, (args, kwargs or {}))
        result = op(*unwrapped[0], **unwrapped[1])
        if op.overloadpacket.__name__ == "copy_":
            return args[0]
        if op.overloadpacket.__name__ not in KEPT:
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, Weight, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        group = _get_module_fsdp_state(module)._fsdp_param_group
        is_backward = group._training_state == TrainingState.PRE_BACKWARD
        is_coarse = is_backward and group._reshard_after_forward
        SENT.append("6 bits" if is_coarse else "8 bits")
        return quantized(self.high, 31 if is_coarse else 127), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        numbers, scales = outputs
        if out is None:
            values = numbers * scales
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            torch.mul(numbers, scales, out=out)
        return None


def main() -> None:
    dist.init_process_group("gloo")
    model = blocks()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Weight(module.weight.detach()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for position, module in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        fully_shard(module, mesh=mesh, reshard_after_forward=position % 2 == 0)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(STEPS):
        loss = model(vectors(step, dist.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    tell([model], losses, sent={kind: SENT.count(kind) for kind in sorted(set(SENT))})


if __name__ == "__main__":
    main()
