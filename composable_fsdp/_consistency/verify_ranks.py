"""Verify that all ranks have built the same model, before a collective whose size could differ between them.

Each rank describes what it has built in lines of text. Ranks compare digests in a message of fixed size. If these
differ, all ranks exchange the lines and raise the same error, which names the differences.

What else ranks exchange only to compare it is gathered here too: samples of values, sizes of payloads, flags.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from composable_fsdp._consistency.process_groups import gather_objects
from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._core.comm import Collective, Communicator, Transfer, is_over_group
from composable_fsdp._core.seams import runs_unseen
from composable_fsdp.errors import DivergenceError, FSDPError

T = TypeVar("T")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Matches addresses in the default ``repr`` of functions and objects, which differ between processes."""
_NOTHING = "nothing more"


@runs_unseen
@torch.inference_mode(False)
@torch.no_grad()
def verify_same(
    own: Iterable[str],
    communicators: Iterable[Communicator],
    device: torch.device,
    subject: str,
    facts: Callable[[], Sequence[int]] = tuple,
) -> dict[int, list[int]]:
    """Verify that ``own`` is the same on all ranks along ``communicators``. All of them must call it together.

    Args:
        own: a line for each part of what this rank has built. Not evaluated if there is nothing to compare with.
        communicators: the axes of one mesh. Axes without a process group, as in simulations, are ignored.
        device: the device of the communicators' tensors.
        subject: what is compared, the same on every rank. Used in the label of the operation and in the error.
        facts: returns 64-bit integers to send in the same message, the same number on every rank. Evaluated as ``own``
            is.

    Returns:
        The facts of every rank, by rank. Empty if there is nothing to compare with.

    Raises:
        DivergenceError: the lines differ, or the versions of this library or torch. All ranks raise it with the same
            text.
    """
    axes = multi_rank_axes(communicators)
    if not axes:
        return {}
    text = _ADDRESS.sub("", "\n".join((versions(), *own))).encode()
    digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
    sent = torch.tensor([dist.get_rank(), digest, *facts()], device=device)
    rows = gather_rows(sent, axes, f"comparison of {subject}").tolist()
    if any(other != digest for _, other, *_ in rows):
        lines = gather_by_rank(text.decode().split("\n"), axes)
        check_versions({rank: first for rank, (first, *_) in lines.items()})
        raise DivergenceError(difference_text(subject, lines))
    return {rank: numbers for rank, _, *numbers in rows}


@cache
def library_version() -> str:
    """Return the version of this library on this rank."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("composable-fsdp")
    return "unknown"


def versions() -> str:
    """Return the versions of this library and of torch on this rank."""
    return f"composable_fsdp {library_version()}, torch {torch.__version__}"


def check_versions(found: Mapping[int, str], kind: type[FSDPError] = DivergenceError) -> None:
    """Raise an error of ``kind`` if the :func:`versions` of ranks, ``found``, differ. Its text names both."""
    if len({*found.values()}) > 1:
        raise kind(f"Ranks run different versions:{_lines(found)}\nInstall the same versions for all ranks.")


def _lines(texts: Mapping[int, str]) -> str:
    """Return a line for each distinct text, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "".join(f"\n  {format_ranks(who)}: {text}" for text, who in ranks.items())


def gather_by_rank(own: T, communicators: Iterable[Communicator]) -> dict[int, T]:
    """Return ``own`` of all ranks along ``communicators``, of which some has several, by rank, as all ranks must."""
    found = {dist.get_rank(): own}
    for axis in multi_rank_axes(communicators):
        found = {rank: each for part in gather_objects(found, axis) for rank, each in part.items()}
    return found


def multi_rank_axes(communicators: Iterable[Communicator]) -> list[Communicator]:
    """Return the axes with several ranks. There are none in simulations, whose fake tensors cannot be compared."""
    if isinstance(torch.empty(0), FakeTensor):
        return []
    return [c for c in communicators if is_over_group(c) and c.size > 1]


@runs_unseen
def gather_rows(own: torch.Tensor, axes: Sequence[Communicator], label: str) -> torch.Tensor:
    """Return ``own``, ``(n,)``, of all ranks along all ``axes`` as ``(ranks, n)``."""
    gathered = own
    for axis in axes:
        # Initialized with copies of our rows, since backends that transfer nothing leave them unchanged.
        received = gathered.repeat(axis.size)
        axis.launch(Collective.ALL_GATHER, [Transfer(received, gathered)], label).wait()
        gathered = received
    return gathered.view(-1, own.numel())


def difference_text(subject: str, lines: Mapping[int, Sequence[str]]) -> str:
    """Return the error text for ranks whose ``lines`` differ, with the first difference."""
    index = next(i for i, parts in enumerate(zip_longest(*lines.values())) if len(set(parts)) > 1)
    first = _lines({rank: own[index] if index < len(own) else _NOTHING for rank, own in lines.items()})
    return (
        f"Ranks have built different models. The first difference in {subject}:{first}\n"
        "All ranks must build the same modules, with the same parameters in the same order, and shard them by the same "
        "calls with the same options."
    )
