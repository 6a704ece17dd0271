"""Train with 8-bit primary weights as Transformer Engine does with ``quantized_model_init`` and its ``FusedAdam``.

Re-made small, as its kernels need CUDA: modules are made on the meta device, sharded, and then replace their parameters
by DTensors with quantized local tensors. The hooks of these read the state of FSDP2 to choose the usage of a weight in
forward and backward, and hand over the gathered bytes by ``out._data = data``. One scale for all ranks comes from a
reduction over the mesh that the hook gets. The optimizer has fp32 master weights, and quantizes them into the shards.
"""

from typing import Any

import torch
import torch.distributed as dist
from models import vectors
from outcome import STEPS, tell
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor

WIDTH = 64
USES: list[str] = []
"""The usages of gathered weights, in order of the products."""


class Quantizer:
    """Scales a tensor to the range of ``float8_e4m3fn``, with one scale for all ranks of ``group``."""

    def __init__(self, usage: str = "both", group: dist.ProcessGroup | None = None) -> None:
        self.usage, self.group = usage, group

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = values.abs().max()
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scale_inverse = largest.clamp(min=1e-12) / 448
        return (values / scale_inverse).to(torch.float8_e4m3fn).view(torch.uint8), scale_inverse


class Weight(torch.Tensor):
    """A weight whose values are bytes and one scale. Operations that it does not know compute with its values."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inverse: torch.Tensor, quantizer: Quantizer) -> "Weight":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, strides=data.stride())

    def __init__(self, data: torch.Tensor, scale_inverse: torch.Tensor, quantizer: Quantizer) -> None:
        self._data, self._scale_inverse, self._quantizer = data, scale_inverse, quantizer

    def dequantize(self) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inverse

    def quantize_(self, values: torch.Tensor) -> None:
        """Replace the values in place."""
        data, self._scale_inverse = self._quantizer.quantize(values)
        self._data.copy_(data)

    def _like(self, data: torch.Tensor) -> "Weight":
        return Weight(data, self._scale_inverse, self._quantizer)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name in ("detach", "view", "as_strided", "slice", "split", "clone", "new_zeros", "empty_like"):
            first, *others = args
            named = {**(kwargs or {}), **({"dtype": torch.uint8} if name == "new_zeros" else {})}
            result = op(first._data, *others, **named)
            return torch.utils._pytree.tree_map_only(torch.Tensor, first._like, result)
        if name == "copy_" and isinstance(args[0], Weight) and isinstance(args[1], Weight):
            args[0]._data.copy_(args[1]._data)
            args[0]._scale_inverse = args[1]._scale_inverse
            return args[0]
        plain = torch.utils._pytree.tree_map_only(Weight, Weight.dequantize, (args, kwargs or {}))
        return op(*plain[0], **plain[1])

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, mp_policy: Any) -> Any:
        self._quantizer.group = mesh.get_group()  # for the optimizer's next step
        group = _get_module_fsdp_state(module)._fsdp_param_group
        usage = "both"
        if group._reshard_after_forward:
            usage = "columns" if group._training_state == TrainingState.PRE_BACKWARD else "rows"
        return (self._data,), (self._scale_inverse, Quantizer(usage, self._quantizer.group))

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: "Weight | None" = None
    ) -> Any:
        (data,), (scale_inverse, quantizer) = outputs, metadata
        if out is None:
            out = Weight(data, scale_inverse, quantizer)
        out._data, out._scale_inverse, out._quantizer = data, scale_inverse, quantizer
        return out, outputs


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        USES.append(f"forward, {weight._quantizer.usage}")
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        USES.append(f"backward, {ctx.weight._quantizer.usage}")
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight.dequantize(), gradient.t() @ x


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.bias = nn.Parameter(torch.empty(WIDTH, device="meta"))
        self.weight.holds_bytes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight) + self.bias

    def reset_parameters(self) -> None:
        """Replace parameters on meta by initialized ones, the weight quantized."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            mesh = parameter.device_mesh
            local = torch.empty_like(parameter.to_local(), device="cpu").uniform_(-0.1, 0.1)
            if name == "weight":
                quantizer = Quantizer(group=mesh.get_group())
                local = Weight(*quantizer.quantize(local), quantizer)
            placed = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            self.register_parameter(name, nn.Parameter(DTensor.from_local(local, mesh, parameter.placements, **placed)))


class MasterAdam:
    """Adam with fp32 master weights and states, on local shards."""

    def __init__(self, parameters: Any) -> None:
        self.state = {p: {"master": values_of(p._local_tensor).clone(), "step": 0} for p in parameters}

    @torch.no_grad()
    def step(self) -> None:
        for p, state in self.state.items():
            gradient, master = p.grad.to_local().float(), state["master"]
            mean, square = (state.setdefault(name, torch.zeros_like(master)) for name in ("mean", "square"))
            state["step"] += 1
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square(), 0.01)
            unbiased = (mean / (1 - 0.9 ** state["step"]), square / (1 - 0.99 ** state["step"]))
            master.sub_(unbiased[0] / (unbiased[1].sqrt() + 1e-8), alpha=1e-2)
            local = p._local_tensor
            local.quantize_(master) if isinstance(local, Weight) else local.copy_(master)
            p.grad = None


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.dequantize() if isinstance(tensor, Weight) else tensor).detach()


@torch.no_grad()
def compare_gathered(model: nn.Module) -> None:
    """Check the quantized all-gather against one of the values."""
    whole = {}
    for name, parameter in model.named_parameters():
        local = values_of(parameter._local_tensor)
        pieces = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, local)
        whole[name] = torch.cat(pieces)
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    for name, parameter in model.named_parameters():
        assert torch.equal(values_of(parameter), whole[name]), name
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Linear() for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    marks = [getattr(parameter, "holds_bytes", False) for parameter in model.parameters()]
    for position, child in enumerate(model):
        fully_shard(child, mesh=mesh, reshard_after_forward=position != 1)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for parameter, mark in zip(model.parameters(), marks, strict=True):
        parameter.holds_bytes = mark
        assert isinstance(parameter._local_tensor, Weight) is mark
    optimizer = MasterAdam(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = (model(vectors(step, dist.get_rank(), width=WIDTH)) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert all(isinstance(p._local_tensor, Weight) is mark for p, mark in zip(model.parameters(), marks, strict=True))
    compare_gathered(model)
    local = [values_of(parameter._local_tensor).double().sum().item() for parameter in model.parameters()]
    tell([model], losses, local=local, uses={use: USES.count(use) for use in sorted(set(USES))})


if __name__ == "__main__":
    main()
