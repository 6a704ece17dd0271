"""What ranks say of a checkpoint or a state dict, as one text for users. Pure."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from composable_fsdp.errors import CheckpointError

__all__ = [
    "Mismatch",
    "differ",
    "dtype_name",
    "joined",
    "leave_common_unexpected",
    "named",
    "refuse",
    "said",
    "tensor_text",
    "told",
]

_SHOWN = 20
_TITLES = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shapes": "of another shape",
    "dtypes": "of another dtype",
    "classes": "of another tensor class, or cut where this cannot be undone",
}


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def joined(texts: Mapping[int, str], size: int) -> str:
    """One sentence for each of the ``texts`` of ranks, which says whose it is unless all ``size`` ranks have it."""
    found = _grouped({rank: [text] for rank, text in texts.items()})
    if len(texts) == size and len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{named(ranks)}: {text}" for text, ranks in found.items())


_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STACK = re.compile(r"\n\s*(Exception raised from |C\+\+ CapturedTraceback|frame #0: )")
_UNPICKLER = re.compile(r"WeightsUnpickler error: *(.*)")
_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")


def said(error: BaseException) -> str:
    """Type and text of ``error``, without colours for terminals and without the C++ stack that torch puts below it."""
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
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_text(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """``float32 (2, 3)``."""
    return f"{dtype_name(dtype)} {tuple(shape)}"


def differ(found: object, expected: object) -> str:
    """What a :class:`Mismatch` says of a shape or dtype."""
    return f"{found}, expected {expected}"


@dataclass
class Mismatch:
    """How what one rank is to load differs from what it loads into.

    Attributes:
        missing: what is wanted, by name.
        unexpected: what is there, by name.
        shapes: what both have, by name.
        dtypes: what both have, by name.
        classes: tensors of classes of their own, and inner tensors of these, by name.
        others: sentences.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def leave_common_unexpected(mismatches: Sequence[Mismatch]) -> None:
    """Of what some rank does expect, no rank says that it is unexpected: ranks may hold different parts of a model."""
    common = set.intersection(*(set(mismatch.unexpected) for mismatch in mismatches))
    for mismatch in mismatches:
        mismatch.unexpected = {name: what for name, what in mismatch.unexpected.items() if name in common}


def told(mismatches: Mapping[int, Mismatch]) -> str:
    """All differences of all ranks, by kind; with the ranks that have it, where that is not all. Empty for none."""
    lines = []
    for kind, title in _TITLES.items():
        entries = _marked(
            {rank: [f"{n}: {what}" for n, what in vars(m)[kind].items()] for rank, m in mismatches.items()}
        )
        if entries:
            lines += [f"  {title} ({len(entries)}):", *(f"    {entry}" for entry in entries[:_SHOWN])]
        if len(entries) > _SHOWN:
            lines.append(f"    and {len(entries) - _SHOWN} more")
    lines += [f"  {sentence}" for sentence in _marked({rank: mismatch.others for rank, mismatch in mismatches.items()})]
    return "\n".join(lines)


def refuse(what: str, mismatches: Mapping[int, Mismatch]) -> None:
    """Raises if any rank has differences: the same error, if it is called with the same on every rank.

    Raises:
        CheckpointError: says that ``what`` does not fit, and all differences.
    """
    differences = told(mismatches)
    if differences:
        raise CheckpointError(f"{what}. Nothing was loaded.\n{differences}")


def _grouped(texts: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    """Every text, with the ranks that it is from."""
    ranks: dict[str, list[int]] = {}
    for rank, own in texts.items():
        for text in own:
            ranks.setdefault(text, []).append(rank)
    return ranks


def _marked(texts: Mapping[int, Iterable[str]]) -> list[str]:
    return [
        text if len(ranks) == len(texts) else f"{text} (on {named(ranks)})" for text, ranks in _grouped(texts).items()
    ]
