"""Tensor subclasses for the tests of checkpoints, and a model with one parameter of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests._internals import like, local_part
from tests.helpers.extension_tensors import Pair

aten = torch.ops.aten


class Tagged(torch.Tensor):
    """A class without ``__torch_dispatch__``. Its values are in its own memory."""


class Closed(torch.Tensor):
    """A class with ``__torch_dispatch__`` but without ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: torch.Tensor) -> None:
        self.held = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Closed({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


class Coded(torch.Tensor):
    """Holds codes, a scale for each row and each column, packed blocks across rows, and an optional note. Blocks span
    rows, so a shard with an odd number of rows packs its blocks again."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, *others: Any, **more: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )

    def __init__(
        self,
        codes: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
        blocks: torch.Tensor | None,
        note: torch.Tensor | None = None,
        kind: str = "signed",
    ) -> None:
        self.codes, self.rows, self.columns, self.blocks = codes, rows, columns, blocks
        self.note, self.kind = note, kind

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Coded({self.codes})"

    @staticmethod
    def made(values: torch.Tensor, *, has_blocks: bool) -> Coded:
        height, width = values.shape
        codes = torch.randint(-100, 100, (height, width), dtype=torch.int8)
        blocks = torch.randn(_num_blocks(codes)) if has_blocks else None
        return Coded(codes, torch.randn(height, 1), torch.randn(width), blocks)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _INNER if getattr(self, name) is not None], self.kind

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], kind: Any, *_: object) -> Any:
        held: list[Any] = [inner.get(name) for name in _INNER]
        return Coded(held[0], held[1], held[2], held[3], held[4], kind)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
        values = (getattr(self, name) for name in _INNER)
        held: list[Any] = [None if each is None else change(each) for each in values]
        return Coded(held[0], held[1], held[2], held[3], held[4], self.kind)

    def cut(self, dim: int, start: int, end: int) -> Coded:
        codes = self.codes[start:end] if dim == 0 else self.codes[:, start:end]
        rows = self.rows[start:end] if dim == 0 else self.rows
        columns = self.columns if dim == 0 else self.columns[start:end]
        blocks = None if self.blocks is None else torch.full((_num_blocks(codes),), float(start))
        return Coded(codes, rows, columns, blocks, self.note, self.kind)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own: Any = args[0]
        if func is aten.split.Tensor:
            dim, step = (args[2] if len(args) > 2 else kwargs.get("dim", 0)), args[1]
            return [own.cut(dim, at, at + step) for at in range(0, own.shape[dim], step)]
        if func is aten.slice.Tensor:
            return own.cut(*(args[1:] or (0,)))
        if func is aten.new_zeros.default:
            zeros, (height, width) = torch.zeros, args[1]
            codes = zeros(height, width, dtype=torch.int8)
            blocks = None if own.blocks is None else zeros(_num_blocks(codes))
            return Coded(codes, zeros(height, 1), zeros(width), blocks, own.note, own.kind)
        if func is aten.copy_.default:
            for name in args[1].__tensor_flatten__()[0]:
                getattr(own, name).copy_(getattr(args[1], name))
            return own
        if func in (aten.as_strided.default, aten.view.default):
            return own.map(lambda each: each)
        if func in (aten.detach.default, aten.clone.default, aten.empty_like.default, aten.zeros_like.default):
            return own.map(lambda each: func(each))
        raise NotImplementedError(func)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.rows), self.columns

    def fsdp_post_all_gather(self, outputs: Any, columns: Any, param_dtype: Any, *, out: Any = None) -> Any:
        full = outputs[0] * outputs[1] * columns
        if out is None:
            return full, (full,)
        out.copy_(full)
        return None


_INNER = ("codes", "rows", "columns", "blocks", "note")


def _num_blocks(codes: torch.Tensor) -> int:
    return -(-codes.numel() // 8)


class Blocked(torch.Tensor):
    """Int8 codes with a scale for each 8 values in memory order, which may span rows. It quantizes in ``copy_``. As
    torchao's signed 8-bit codes, its codes have no -1, so that quantizing again changes values."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, note: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, note: Any = None) -> None:
        self.codes, self.scales, self.note = codes, scales, note

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Blocked({self.codes})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], note: Any, *_: object) -> Any:
        return Blocked(inner["codes"], inner["scales"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own: Any = args[0]
        other: Any = args[1] if len(args) > 1 else None
        if func in (aten.detach.default, aten.view.default, aten._to_copy.default):
            return cls(own.codes, own.scales, own.note)
        if func is aten.copy_.default and isinstance(own, Blocked):
            values = (torch.empty(other.shape).copy_(other) if isinstance(other, Blocked) else other).reshape(-1, 8)
            own.scales.copy_(values.abs().amax(1))
            codes = (values / own.scales.clamp(min=1e-30)[:, None] * 127).round().clamp(-126, 127)
            own.codes.copy_(codes.view(own.shape))
            return own
        if func is aten.copy_.default:
            return own.copy_((other.codes.reshape(-1, 8) / 127 * other.scales[:, None]).view(own.shape))
        raise NotImplementedError(func)


class BlockedAdam(torch.optim.Optimizer):
    """Keeps a moment as a ``Blocked``, except of shards whose number of elements is no multiple of 8."""

    def __init__(self, parameters: Any, lr: float, note: Any = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.note = note

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local, grad = local_part(p), local_part(p.grad)
                state = self.state[p]
                if not state:
                    zeros: Any = torch.zeros_like(local)
                    if local.numel() and local.numel() % 8 == 0:
                        scales = torch.zeros(local.numel() // 8)
                        zeros = Blocked(torch.zeros(local.shape, dtype=torch.int8), scales, self.note)
                    state["moment"] = like(p, zeros)
                moment = local_part(state["moment"])
                values = torch.empty(local.shape).copy_(moment).lerp(grad, 0.1)
                moment.copy_(values)
                local.sub_(group["lr"] * values)


CLASSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tagged": lambda values: values.as_subclass(Tagged),
    "pair": lambda values: Pair(values / 2, values / 2 + 1),
    "coded": lambda values: Coded.made(values, has_blocks=False),
    "in blocks": lambda values: Coded.made(values, has_blocks=True),
}


def model_of(kinds: list[str], seed: int, shape: tuple[int, int] = (6, 3)) -> nn.Module:
    """Return a model with one weight of each of ``kinds``. Shards of two ranks are square."""
    torch.manual_seed(seed)
    model = nn.ModuleDict()
    for kind in kinds:
        linear = nn.Linear(shape[1], shape[0])
        linear.weight = nn.Parameter(CLASSES[kind](linear.weight.detach()), requires_grad=kind in ("tagged", "pair"))
        model[kind] = linear
    return model


def inner_of(tensor: Any) -> dict[str, torch.Tensor]:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if not hasattr(local, "__tensor_flatten__"):
        return {"values": local.as_subclass(torch.Tensor)}
    return {name: getattr(local, name) for name in local.__tensor_flatten__()[0]}
