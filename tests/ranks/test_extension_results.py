"""Test results of all-gather hooks, and the operations that a tensor subclass supports."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

import composable_fsdp
from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import LostExtensionWarning, ParameterError, UnsupportedError
from tests._internals import state_of
from tests.helpers.extension_tensors import Pair, Scaled, batch_of
from tests.helpers.run_ranks import on_ranks


class WithHooks(torch.Tensor):
    fsdp_pre_all_gather: Any
    fsdp_post_all_gather: Any


def build_linear(kind: Any) -> Any:
    """Return a linear layer from 3 to 9 features whose weight has the class ``kind``."""
    torch.manual_seed(6)
    layer: Any = nn.Linear(3, 9, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(kind))
    return layer


class PadsRows(WithHooks):
    """Pads its rows, sends them in bf16, and returns the padded rows in the compute dtype."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        rows = torch.zeros(-(-size[0] // mesh.size()), *size[1:], dtype=torch.bfloat16)
        rows[: self.size(0)].copy_(self)
        return (rows,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (gathered,) = outputs
        if out is None:
            full = gathered.to(dtype)
            return full, (gathered, full)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[: out.size(0)])
        return None


class PadsFurther(PadsRows):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        padded = torch.cat([outputs[0], outputs[0].new_zeros(4, *outputs[0].shape[1:])]).to(dtype)
        if out is None:
            return padded, (padded,)
        out.copy_(padded[: out.size(0)])
        return None


class ReturnsFlat(PadsRows):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        flat = outputs[0].view(-1).to(dtype)
        if out is None:
            return flat, (flat,)
        out.view(-1).copy_(flat[: out.numel()])
        return None


class PadsColumns(WithHooks):
    """Like ``PadsRows`` on dim 1: sends columns as rows."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        columns = torch.zeros(-(-size[1] // mesh.size()), size[0], dtype=torch.bfloat16)
        columns[: self.size(1)].copy_(self.t())
        return (columns,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        full = outputs[0].t().to(dtype).contiguous()
        if out is None:
            return full, (full,)
        out.copy_(full[:, : out.size(1)])
        return None


def gather_plain(tensor: Any) -> torch.Tensor:
    """Return the full tensor of a DTensor whose class torch's functional collectives cannot return."""
    local, spec = tensor._local_tensor.detach().as_subclass(torch.Tensor), tensor._spec
    return DTensor(local, spec, requires_grad=False).full_tensor()


def place(dim: int, _: nn.Parameter) -> Shard:
    return Shard(dim)


@pytest.mark.behaviour("E-01", "E-03", "E-04")
@on_ranks(4)
def test_a_padded_result_of_the_second_hook_is_cut() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kinds = ((PadsRows, 0), (PadsFurther, 0), (ReturnsFlat, 0), (PadsColumns, 1))
    for (kind, dim), dtype, reshard in product(kinds, (None, torch.bfloat16), (True, False)):
        what = f"{kind.__name__}, {dtype}, {reshard}"
        model, reference = build_linear(kind), build_linear(torch.Tensor)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        placement_of = partial(place, dim)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            batches = [batch_of(step, other)[:, :3] for other in range(world_size)]
            rounded = reference.weight.bfloat16().to(dtype or torch.float32)
            losses = [F.linear(x.to(rounded.dtype), rounded).float().square().mean() for x in batches]
            loss = model(batches[rank]).float().square().mean()
            torch.testing.assert_close({what: loss}, {what: losses[rank]})
            loss.backward()
            reference.zero_grad()
            torch.stack(losses).mean().backward()
            gradient = gather_plain(model.weight.grad)
            torch.testing.assert_close(gradient, reference.weight.grad, rtol=2e-2, atol=1e-3)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                reference.weight.copy_(gather_plain(model.weight))


class Releases(WithHooks):
    """Is sent in fp32 and computed with in another dtype, in memory of its own; says if the outputs are freed."""

    releases: ClassVar[Any] = True
    aliases: ClassVar[bool] = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            return None if self.aliases else out.copy_(outputs[0])
        full = outputs[0] if self.aliases else outputs[0].to(dtype, copy=True)
        return full, (full,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.releases


class Keeps(Releases):
    releases = False


class Aliases(Releases):
    aliases = True


class Unsure(Releases):
    releases = None


class ProbedLinear(nn.Linear):
    """Notes the bytes of the unsharded weight in each forward and in each backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted = self.noted = getattr(self, "noted", [])
        (bucket,) = state_of(self).group.buckets

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
                noted.append(bucket.unsharded_bytes)
                return weight.view_as(weight)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                noted.append(bucket.unsharded_bytes)
                return gradient

        return F.linear(x, Probe.apply(self.weight))


@pytest.mark.behaviour("E-03")
@on_ranks(2)
def test_gathered_outputs_are_freed_as_soon_as_the_parameter_exists_if_its_class_says_so() -> None:
    found: dict[tuple[Any, bool], list[torch.Tensor]] = {}
    for kind, reshard in product((Keeps, Releases), (True, False)):
        model: Any = build_linear(kind)
        model.__class__ = ProbedLinear
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
        values = found[kind, reshard] = []
        for step in range(3):
            loss = model(batch_of(step, dist.get_rank())[:, :3]).float().square().mean()
            loss.backward()
            values += [loss.detach(), gather_plain(model.weight.grad)]
            with torch.no_grad():
                model.weight.sub_(model.weight.grad)
        compute, output = 9 * 3 * 2, 9 * 3 * 4
        assert model.noted == [compute if kind is Releases else compute + output] * 6, (kind, model.noted)
        assert sum(bucket.unsharded_bytes for bucket in state_of(model).group.buckets) == 0
    for values in found.values():
        torch.testing.assert_close(values, found[Keeps, True], rtol=0, atol=0)


@on_ranks(4)
def test_outputs_that_are_still_needed_are_not_freed() -> None:
    name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
    with pytest.raises(ParameterError, match=rf"^{name} of parameter 'weight' must return a bool, not None\.$"):
        fully_shard(build_linear(Unsure))
    with pytest.raises(
        ParameterError, match=rf"parameter 'weight' is made of its gathered outputs, which {name} says to"
    ):
        fully_shard(build_linear(Aliases))(batch_of(0, 0)[:, :3])
    model = fully_shard(build_linear(Keeps), reshard_after_forward=2)
    with pytest.raises(
        UnsupportedError, match=r"cannot keep slices of parameter 'weight'.* Pass reshard_after_forward=T"
    ):
        model(batch_of(0, 0)[:, :3])


class Fills(WithHooks):
    """Sends its rows unchanged and copies the gathered rows into a tensor of its own."""

    later = "copies"

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        if self.later == "keeps":  # The hook owns this memory. It neither frees it nor fills it again.
            self.cached[0] = self.cached[0] if out is not None else outputs[0].clone()
            return (self.cached[0], ()) if out is None else None
        made = outputs[0].clone()
        if out is None:
            if self.later == "returns views":
                return outputs[0].view(made.shape), (outputs[0],)
            return made, () if self.later == "forgets, returns another" else (made,)
        if self.later == "copies":
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(made)
        if self.later == "copies by data, returns another":
            out.data.copy_(made)
        if self.later in ("returns another", "forgets, returns another", "returns views"):
            return made, (made,)
        return (made, (made,)) if "returns another" in self.later else None

    cached: ClassVar[dict[int, torch.Tensor]] = {}


class FillsOne(Pair):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            out.left.copy_(outputs[0])
            return None
        left, right = (output.clone() for output in outputs)
        return Pair(left, right), (left, right)


@pytest.mark.behaviour("E-03", "H-02")
@on_ranks(2)
def test_a_hook_that_does_not_fill_its_tensor_again_is_an_error() -> None:
    marked = torch.full((9, 3), 0xA5A5A5A5, dtype=torch.uint32).view(torch.float32)  # marks unfilled memory
    fills = ("copies", "copies by data, returns another", "returns views", "keeps")
    for later in (*fills, "returns nothing", "returns another", "forgets, returns another"):
        for weight in (None, marked):
            model = build_linear(type("Fills", (Fills,), {"later": later, "cached": {}}))
            if weight is not None:
                model.weight.data.copy_(weight)
            exact = model.weight.detach().as_subclass(torch.Tensor).clone()
            fully_shard(model)
            model.unshard()
            model.reshard()
            if later in fills:
                for _ in range(2):
                    model.unshard()
                    assert torch.equal(model.weight.detach(), exact), later
                    model.reshard()
                continue
            with pytest.raises(
                ParameterError, match=r"of parameter 'weight' \(Fills\) ignored out.*out\.copy_"
            ) as caught:
                model.unshard()
            assert "views of the gathered outputs" in str(caught.value)
    layer: Any = nn.Linear(3, 4)
    layer.weight = nn.Parameter(FillsOne(torch.ones(4, 3), torch.ones(4, 3)))
    fully_shard(layer)
    layer.unshard()
    layer.reshard()
    with pytest.raises(ParameterError, match=r"of parameter 'weight' \(FillsOne\) ignored out"):
        layer.unshard()


class Largest(WithHooks):
    fails = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        if self.fails:
            raise KeyError("no such scale")
        scale = self.as_subclass(torch.Tensor).abs().max()
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return ((self.as_subclass(torch.Tensor) / scale * 127).round().to(torch.int8),), scale

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        full = outputs[0].to(dtype) * metadata / 127
        if out is None:
            return full, (full,)
        out.copy_(full)
        return None


class FailsAnyhow(Largest):
    fails = True


@pytest.mark.behaviour("E-04")
@on_ranks(2)
def test_a_hook_that_cannot_take_an_empty_shard_gets_a_row_of_zeros() -> None:
    for kind in (Largest, FailsAnyhow):
        torch.manual_seed(3)
        model: Any = nn.Linear(4, 1, bias=False)
        exact = model.weight.detach().clone()
        model.weight = nn.Parameter(exact.as_subclass(kind))
        fully_shard(model, reshard_after_forward=True)
        assert model.weight.to_local().numel() == 4 * (dist.get_rank() == 0)
        if kind.fails:  # the hook's own error is visible, on a rank with rows and on a rank without rows
            with pytest.raises(KeyError, match="no such scale"):
                model.unshard()
            continue
        for _ in range(2):
            x = torch.ones(1, 4, requires_grad=True)
            model(x).sum().backward()
            scale = exact.abs().max() / 127
            torch.testing.assert_close(x.grad, (exact / scale).round() * scale)


class Few(Pair):
    """Like torchao's ``MXTensor``, supports narrow and clone but not split, new_zeros or copy_."""

    refused: ClassVar[tuple[str, ...]] = ("split", "new_zeros", "copy_")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket.__name__ in cls.refused:
            raise NotImplementedError(f"{cls.__name__} does not know {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Uncut(Few):
    refused = ("split", "slice")


class Hookless(Uncut):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()


@pytest.mark.behaviour("A-16", "H-02")
@on_ranks(2)
def test_a_tensor_class_is_sharded_by_its_operations_or_named_in_an_error() -> None:
    torch.manual_seed(4)
    for rows in (4, 3, 1):
        value = torch.randn(rows, 2)
        layer: Any = nn.Linear(2, rows, bias=False)
        layer.weight = nn.Parameter(Few(value / 2, value / 2), requires_grad=False)
        fully_shard(layer)
        assert type(layer.weight.to_local()) is Few
        torch.testing.assert_close(layer(torch.eye(2)), value.T)
    for kind in (Uncut, Hookless):
        ways = "chunk: NotImplementedError.*narrow: Not"
        layer = nn.Linear(2, 4)
        layer.weight = nn.Parameter(kind(torch.ones(4, 2), torch.ones(4, 2)), requires_grad=False)
        with pytest.raises(
            ParameterError, match=f"'weight' is a {kind.__name__}, which cannot be.*{ways}.*ignored_par"
        ):
            fully_shard(layer)


class Boxed(torch.Tensor):
    """Holds its values in another tensor, has no hooks, and can be copied into a plain tensor."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.values_inside = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.values_inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map(lambda x: x.values_inside if isinstance(x, Boxed) else x, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not isinstance(args[0], Boxed):
            return result
        boxed = tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)
        return return_and_correct_aliasing(func, args, kwargs, boxed)


class Flattened(Boxed):
    """One that torch can take apart, too."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Any:
        return Flattened(inner["values_inside"])


class Sealed(Boxed):
    """One that cannot be copied into a plain tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], Boxed):
            raise NotImplementedError(f"Sealed does not know {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def boxed_linear(kind: Any, rows: int) -> Any:
    torch.manual_seed(7)
    layer: Any = nn.Linear(3, rows, bias=False)
    layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return layer


@pytest.mark.behaviour("E-05")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [4, 5])
@on_ranks(2)
def test_a_tensor_class_without_hooks_stays_on_the_shard_and_trains_as_in_torch(
    rows: int, dtype: torch.dtype | None
) -> None:
    for kind in (Boxed, Flattened):
        found = []
        for library in (torch_fsdp, composable_fsdp):
            model: Any = boxed_linear(kind, rows)
            policy = library.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            library.fully_shard(model, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for step in range(3):
                loss = model(batch_of(step, dist.get_rank())[:, :3]).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert type(model.weight._local_tensor) is kind, (library, model.weight)
            found.append((losses, model.weight._local_tensor.values_inside))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@on_ranks(2)
def test_a_tensor_class_without_hooks_that_cannot_be_copied_is_named_with_the_remedy() -> None:
    model = fully_shard(boxed_linear(Sealed, 4))
    with pytest.raises(
        ParameterError,
        match=r"'weight' is a Sealed, which cannot be gathered: copy_ into a plain tensor: NotImpl.*ignored_params",
    ):
        model(batch_of(0, 0)[:, :3])


class Forgetful(Pair):
    """A pair whose ``new_zeros`` returns a plain tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_zeros.default:
            return func(args[0].left, *args[1:], **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and type(args[0]) is torch.Tensor:
            return func(args[0], args[1].left + args[1].right)
        return super().__torch_dispatch__(func, types, args, kwargs)


class HookedParameter(nn.Parameter):
    """A parameter subclass with hooks. Torch's operations on it return plain tensors."""

    fsdp_pre_all_gather = Fills.fsdp_pre_all_gather
    fsdp_post_all_gather = Fills.fsdp_post_all_gather


@pytest.mark.behaviour("E-06", "H-02")
@on_ranks(2)
def test_lost_hooks_give_a_warning() -> None:
    layer: Any = nn.Linear(2, 4)
    layer.weight = nn.Parameter(Forgetful(torch.ones(4, 2), torch.ones(4, 2)))
    gone = "'weight' has lost its hooks fsdp_post_all_gather, fsdp_pre_all_gather: it was a"
    with pytest.warns(LostExtensionWarning, match=f"{gone} Forgetful, and is a Tensor without.*sharded by chunk"):
        fully_shard(layer)
    layer.unshard()
    assert torch.equal(layer.weight, torch.full((4, 2), 2.0))
    layer = nn.Linear(2, 4)
    layer.weight = HookedParameter(torch.ones(4, 2))
    with pytest.warns(LostExtensionWarning, match=f"{gone} HookedParameter"):
        fully_shard(layer)
    layer = nn.Linear(2, 4)
    Scaled(layer.weight).hang_on()
    with pytest.warns(
        LostExtensionWarning, match=r"attributes of a tensor object: set them on parameter\._local_tensor"
    ):
        fully_shard(layer)
    layer = fully_shard(nn.Linear(2, 4))
    Scaled(layer.weight._local_tensor).hang_on()
    layer(torch.ones(1, 2))
    layer.reshard()
    with pytest.warns(LostExtensionWarning, match=r"is a Tensor without.*replaced after fully_shard \(to_empty"):
        layer.to_empty(device="cpu")
