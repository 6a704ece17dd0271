"""The model and the batch that a plan is made for, from Python objects and from texts of the command line."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

__all__ = ["Batch", "as_loss", "builder_of", "make_batch"]

Batch: TypeAlias = torch.Tensor | str | Sequence[Any] | Mapping[str, Any] | Callable[[], Any]

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


def make_batch(batch: Batch, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``model`` for ``batch``, with new tensors like those in it.

    A single shape is the ``labels``, too, of a model that takes ``input_ids`` and ``labels``, as those of transformers
    do, so that its own loss is counted.

    Raises:
        ConfigurationError: it is no batch.
    """
    if callable(batch):
        batch = batch()
    if isinstance(batch, Mapping):
        return (), {name: _new(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(_new, batch)), {}
    if isinstance(batch, str) and inspect.signature(model.forward).parameters.keys() >= {"input_ids", "labels"}:
        return (), {"input_ids": _new(batch), "labels": _new(batch)}
    if isinstance(batch, torch.Tensor | str):
        return (_new(batch),), {}
    raise ArgumentTypeError(
        "batch must be a tensor, a shape such as '4x4096' or '8x512:bfloat16', a sequence or mapping of these with the "
        f"model's arguments, or a function that returns one, not {batch!r}."
    )


def _new(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
    found = _SHAPE.fullmatch(value) if isinstance(value, str) else None
    if found is None and isinstance(value, str):
        raise ConfigurationError(f"a shape is written as '4x4096' or '8x512:bfloat16', not {value!r}.")
    if found is None:
        return value
    dtype = getattr(torch, found[2] or "int64", None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"torch has no dtype {found[2]!r}.")
    return torch.zeros(tuple(map(int, found[1].split("x"))), dtype=dtype)


def as_loss(output: Any) -> torch.Tensor:
    """Return the loss in what a model returns: its ``loss``, or the mean of the output, or of its first part."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = output
    while not isinstance(first, torch.Tensor):
        parts = list(first.values()) if isinstance(first, Mapping) else first
        if not isinstance(parts, Sequence) or not parts:
            raise ConfigurationError(
                f"the model returns {type(output).__name__}, in which plan finds no loss. Pass loss=, a function of "
                "the output."
            )
        first = parts[0]
    return first.float().mean() if first.dim() else first


def builder_of(text: str) -> Callable[[], nn.Module]:
    """Return the function that builds the model: ``text`` is ``file.py:function`` or ``package.module:function``.

    Raises:
        ConfigurationError: there is no such function.
    """
    path, _, name = text.rpartition(":")
    found: Any
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise ConfigurationError(f"there is no file {path}.")
        sys.path.insert(0, str(Path(path).resolve().parent))
        found = runpy.run_path(path, run_name="<plan>").get(name)
    elif path:
        try:
            found = getattr(importlib.import_module(path), name, None)
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"there is no module {path}: {error}.") from error
    else:
        raise ConfigurationError(f"{text!r} is no FILE.py:FUNCTION.")
    if not callable(found):
        raise ConfigurationError(f"{path} has no function {name!r}.")
    return cast("Callable[[], nn.Module]", found)
