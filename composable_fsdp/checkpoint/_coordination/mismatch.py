"""Error texts of wrong arguments, and of what all ranks found in a checkpoint or state dict. Pure functions."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp.errors import ArgumentTypeError, CheckpointError

__all__ = [
    "Mismatch",
    "check_arguments",
    "differ",
    "dtype_name",
    "join_rank_texts",
    "leave_common_unexpected",
    "mismatch_text",
    "refuse",
    "said",
    "tensor_text",
]

_SHOWN = 20
_TITLES = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shapes": "of another shape",
    "dtypes": "of another dtype",
    "classes": "of another tensor class, or with shards that cannot be resharded",
}


def check_arguments(signature: str, path: object, model: object, optimizer: object = None) -> None:
    """Raise ``ArgumentTypeError``, which shows ``signature``, if a type is wrong, as when two arguments are swapped."""
    for name, value, fits, wanted in (
        ("path", path, isinstance(path, (str, os.PathLike)), "a str or a path"),
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("optimizer", optimizer, optimizer is None or hasattr(optimizer, "param_groups"), "an optimizer"),
    ):
        if not fits:
            raise ArgumentTypeError(f"{name} must be {wanted}, not {type(value).__name__}. Call {signature}.")


def join_rank_texts(texts: Mapping[int, str], size: int) -> str:
    """Join the ``texts`` of ranks into one line; without rank numbers if all ``size`` ranks have the same text."""
    found = _grouped({rank: [text] for rank, text in texts.items()})
    if len(texts) == size and len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in found.items())


_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STACK = re.compile(r"\n\s*(Exception raised from |C\+\+ CapturedTraceback|frame #0: )")
_UNPICKLER = re.compile(r"WeightsUnpickler error: *(.*)")
_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")


def said(error: BaseException) -> str:
    """Return the type and text of ``error``, without terminal colours and without the C++ stack that torch appends."""
    text = _ESCAPES.sub("", str(error))
    if stack := _STACK.search(text):
        text = text[: stack.start()]
    if isinstance(error, pickle.UnpicklingError) and (reason := _UNPICKLER.search(text)):
        text = reason[1]
        if refused := _CLASS.search(text):
            text = (
                f"it has an object of the class {refused[1]}, which torch.load(weights_only=True) does not admit. If "
                f"you trust whoever wrote it, call torch.serialization.add_safe_globals([{refused[1]}]) first"
            )
    return f"{type(error).__name__}: {text.strip().rstrip('.')}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_text(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def differ(found: object, expected: object) -> str:
    """Return the entry of a :class:`Mismatch` for a shape or dtype."""
    return f"{found}, expected {expected}"


@dataclass
class Mismatch:
    """Differences on one rank between the saved state and the state that it is loaded into.

    A mapping is from a tensor's name to a short description; ``missing`` are those that the saved state lacks.
    ``others`` are sentences.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def leave_common_unexpected(mismatches: Collection[Mismatch]) -> None:
    """Keep as unexpected only the tensors that no rank expects: ranks may hold different parts of a model."""
    common = set.intersection(*(set(mismatch.unexpected) for mismatch in mismatches))
    for mismatch in mismatches:
        mismatch.unexpected = {name: what for name, what in mismatch.unexpected.items() if name in common}


def mismatch_text(mismatches: Mapping[int, Mismatch], ignore: Collection[str] = ()) -> str:
    """Return the differences of all ranks by kind, without those in ``ignore``. Entries name their ranks if not all."""
    lines = []
    for kind, title in _TITLES.items():
        if kind in ignore:
            continue
        entries = _marked(
            {rank: [f"{n}: {what}" for n, what in vars(m)[kind].items()] for rank, m in mismatches.items()}
        )
        if entries:
            lines += [f"  {title} ({len(entries)}):", *(f"    {entry}" for entry in entries[:_SHOWN])]
        if len(entries) > _SHOWN:
            lines.append(f"    and {len(entries) - _SHOWN} more")
    if "others" not in ignore:
        lines += [f"  {sentence}" for sentence in _marked({rank: each.others for rank, each in mismatches.items()})]
    return "\n".join(lines)


def refuse(what: str, mismatches: Mapping[int, Mismatch], ignore: Collection[str] = ()) -> None:
    """Raise if any rank has differences that are not of kinds in ``ignore``; with equal arguments, the same error."""
    differences = mismatch_text(mismatches, ignore)
    if differences:
        raise CheckpointError(f"{what}. Nothing was loaded.\n{differences}")


def _grouped(texts: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, own in texts.items():
        for text in own:
            ranks.setdefault(text, []).append(rank)
    return ranks


def _marked(texts: Mapping[int, Iterable[str]]) -> list[str]:
    found = _grouped(texts).items()
    return [text if len(ranks) == len(texts) else f"{text} (on {ranks_text(ranks)})" for text, ranks in found]
