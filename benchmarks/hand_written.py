"""The least work of one step of sharded groups: torch's own calls, written by hand for one kind of model.

It is the floor of host time in ``host_overhead.py``. All groups share one all-gather in forward, one in backward and
one reduce-scatter, as this library does for small groups. It has no checks, options, errors or recovery, knows the
order of groups beforehand, and takes shapes that the number of ranks divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["shard_by_hand"]

_Hook = Callable[..., Any]


class _Group:
    """The parameters of one module, whose forward has one tensor as input and one as output."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        owners = [(owner, name, p) for owner in module.modules() for name, p in owner.named_parameters(recurse=False)]
        self.full = [p.detach().clone().requires_grad_() for _, _, p in owners]
        self.sharded = [nn.Parameter(_local_shard(p, mesh)) for _, _, p in owners]
        tables = [owner._parameters for owner, _, _ in owners]
        self.tables = [tables[0]]  # of one ParameterList
        self.of_full = {name: tensor for (_, name, _), tensor in zip(owners, self.full, strict=True)}
        self.of_sharded = {name: tensor for (_, name, _), tensor in zip(owners, self.sharded, strict=True)}
        self.show(self.of_sharded)

    def show(self, tensors: dict[str, Any]) -> None:
        for table in self.tables:
            table.update(tensors)


class _HandWritten:
    """The state of all groups: one flat tensor of shards, and one of full parameters for each group."""

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        self.pg = mesh.get_group()
        self.ranks = mesh.size()
        self.groups = [_Group(module, mesh) for module in modules]
        self.sizes = [p.numel() // self.ranks for group in self.groups for p in group.full]
        self.stores = []
        self.buffers = []
        self.places = []
        for group in self.groups:
            sizes = [p.numel() // self.ranks for p in group.full]
            self.stores.append(torch.cat([p._local_tensor.view(-1) for p in group.sharded]))
            buffer = torch.empty(sum(sizes) * self.ranks)
            for p, flat in zip(group.full, buffer.split([n * self.ranks for n in sizes]), strict=True):
                flat.copy_(p.detach().view(-1))
                p.data = flat
                self.places.append(flat.view(self.ranks, -1))
            self.buffers.append((buffer.untyped_storage(), buffer.nbytes))
        self.parameters = [p for group in self.groups for p in group.full]
        self.sharded = [p for group in self.groups for p in group.sharded]
        self.specs = [p._spec for p in self.sharded]
        self.arrived: list[torch.Tensor] = []
        self.is_gathered = False
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.arrived.append)
        for module, group in zip(modules, self.groups, strict=True):
            module.register_forward_pre_hook(self.before(group))
            module.register_forward_hook(self.after(group))
        self.free()

    def gather(self) -> None:
        """All-gather the parameters of all groups into their buffers."""
        sent = torch.cat(self.stores)
        rows = torch.empty(self.ranks * sent.numel())
        work = dist.all_gather_into_tensor(rows, sent, self.pg, async_op=True)
        work.wait()
        for storage, nbytes in self.buffers:
            storage.resize_(nbytes)
        torch.split_with_sizes_copy(rows.view(self.ranks, -1), self.sizes, dim=1, out=self.places)
        self.is_gathered = True

    def free(self) -> None:
        for storage, _ in self.buffers:
            storage.resize_(0)
        self.is_gathered = False

    def reduce(self) -> None:
        """Reduce-scatter the gradients of all groups, and set those of the sharded parameters."""
        gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        self.arrived.clear()
        rows = torch.empty(self.ranks, sum(self.sizes))
        torch._chunk_cat(gradients, 0, self.ranks, out=rows)
        reduced = torch.empty(sum(self.sizes))
        dist.reduce_scatter_tensor(reduced, rows.view(-1), group=self.pg, async_op=True).wait()
        shards = reduced.mul_(1 / self.ranks).split_with_sizes(self.sizes)
        with torch._C.DisableTorchFunctionSubclass():
            for p, shard, spec in zip(self.sharded, shards, self.specs, strict=True):
                p.grad = DTensor.__new__(DTensor, shard, spec, requires_grad=False)

    def before(self, group: _Group) -> _Hook:
        """Return the pre-forward hook of ``group``."""
        is_first = group is self.groups[0]

        def hook(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            if is_first:
                with torch.no_grad():
                    self.gather()
            group.show(group.of_full)
            viewed = args[0].view_as(args[0])
            viewed.grad_fn.register_hook(lambda *_: group.show(group.of_sharded))
            return (viewed,)

        return hook

    def after(self, group: _Group) -> _Hook:
        """Return the post-forward hook of ``group``."""
        is_first, is_last = group is self.groups[0], group is self.groups[-1]

        def before_backward(_: object) -> None:
            if is_last:
                with torch.no_grad():
                    self.gather()
            group.show(group.of_full)

        def after_backward() -> None:
            with torch.no_grad():
                self.reduce()
            self.free()

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.grad_fn.register_prehook(before_backward)
            group.show(group.of_sharded)
            if is_last:
                self.free()

        if is_first:
            self.end_backward = after_backward
        return hook


def _local_shard(parameter: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def shard_by_hand(model: nn.Module, modules: Sequence[nn.Module], mesh: DeviceMesh) -> Callable[[torch.Tensor], None]:
    """Shard each of ``modules``, and return a function that runs forward and backward of ``model``."""
    groups = _HandWritten(modules, mesh)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        groups.end_backward()

    return step
