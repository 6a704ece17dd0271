"""That all ranks have built the same, before anything travels whose size could differ between them.

Each rank says in lines what it has built. Only their digests travel, in a message whose size does not depend on what is
compared. Where they differ, all ranks exchange the lines, so that all of them raise the same error, which names what
differs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import unified_diff
from hashlib import blake2b
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from composable_fsdp._comm.communicator import Communicator, GroupCommunicator, Transfer
from composable_fsdp.errors import DivergenceError

__all__ = ["check_alike", "difference_text", "ranks_text", "texts_of_all"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In what Python shows of functions and of objects without a text of their own."""
_SHOWN_LINES = 12
_NOTHING = "nothing more"


@torch.inference_mode(False)
@torch.no_grad()
def check_alike(
    own: Iterable[str],
    communicators: Iterable[Communicator],
    device: torch.device,
    subject: str,
    facts: Callable[[], Sequence[int]] = tuple,
) -> dict[int, list[int]]:
    """Compares ``own`` with what all ranks along ``communicators`` give. All of them must call it, together.

    Args:
        own: what this rank has built, a line for each part of it. Not asked for where nothing is compared.
        communicators: of the axes of one mesh. Those that are of no process group, as in simulations, do not count.
        device: on which they take tensors.
        subject: what is compared, the same on every rank: for the label of the operation, and the error.
        facts: gives 64-bit integers that go along in the same message, as many on every rank. Called like ``own``.

    Returns:
        The facts of every rank, by rank. Nothing where nothing is compared.

    Raises:
        DivergenceError: the lines differ. On all ranks, with the same text.
    """
    axes = _compared(communicators)
    if not axes:
        return {}
    text = _ADDRESS.sub("", "\n".join(own)).encode()
    digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
    sent = torch.tensor([dist.get_rank(), digest, *facts()], device=device)
    rows = _from_all(sent, axes, f"comparison of {subject}").tolist()
    if any(other != digest for _, other, *_ in rows):
        lines = {rank: text.split("\n") for rank, text in texts_of_all(text.decode(), axes, device, subject).items()}
        raise DivergenceError(difference_text(subject, lines))
    return {rank: numbers for rank, _, *numbers in rows}


@torch.inference_mode(False)
@torch.no_grad()
def texts_of_all(own: str, communicators: Iterable[Communicator], device: torch.device, subject: str) -> dict[int, str]:
    """The texts of all ranks along ``communicators``, by rank. All of them must call it, together."""
    axes, label, packed = _compared(communicators), f"comparison of {subject}", zlib.compress(own.encode())
    sent = torch.tensor([dist.get_rank(), len(packed)], device=device)
    rows = _from_all(sent, axes, label).tolist()
    length = max(length for _, length in rows)
    message = torch.frombuffer(bytearray(packed.ljust(length, b"\0")), dtype=torch.uint8).to(device)
    texts = [_unpacked(row.numpy().tobytes()) for row in _from_all(message, axes, label).cpu()]
    return {rank: text for (rank, _), text in zip(rows, texts, strict=True)}


def _compared(communicators: Iterable[Communicator]) -> list[Communicator]:
    """Those along which there are other ranks. None in simulations, which have no values to compare."""
    if isinstance(torch.empty(0), FakeTensor):
        return []
    return [c for c in communicators if isinstance(c, GroupCommunicator) and c.size > 1]


def _from_all(own: torch.Tensor, axes: Sequence[Communicator], label: str) -> torch.Tensor:
    """``(ranks, n)``: the ``(n,)`` of every rank. After each axis, all ranks along those so far have been heard."""
    everyones = own
    for axis in axes:
        # Begins as copies of this rank's own, which is what a backend that moves nothing leaves there.
        received = everyones.repeat(axis.size)
        axis.all_gather([Transfer(received, everyones)], label).wait()
        everyones = received
    return everyones.view(-1, own.numel())


def _unpacked(packed: bytes) -> str:
    return zlib.decompressobj().decompress(packed).decode()  # which leaves what follows the end alone


def difference_text(subject: str, lines: Mapping[int, Sequence[str]]) -> str:
    """What is said where the ``lines`` of ranks differ: the first difference for each, and more for two of them."""
    ranks_by_lines: dict[tuple[str, ...], list[int]] = {}
    for rank, own in sorted(lines.items()):
        ranks_by_lines.setdefault(tuple(own), []).append(rank)
    variants = sorted(ranks_by_lines, key=lambda variant: (-len(ranks_by_lines[variant]), ranks_by_lines[variant]))
    place = next(i for i, parts in enumerate(zip_longest(*variants)) if len(set(parts)) > 1)
    first = "".join(
        f"\n  {ranks_text(ranks_by_lines[variant])}: {variant[place] if place < len(variant) else _NOTHING}"
        for variant in variants
    )
    usual, other = variants[:2]
    changes = [
        line for line in unified_diff(usual, other, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]
    shown = "".join(f"\n  {line}" for line in changes[:_SHOWN_LINES])
    more = f"\n  and {len(changes) - _SHOWN_LINES} lines more" if len(changes) > _SHOWN_LINES else ""
    return (
        f"Ranks have built different models. The first difference in {subject}:{first}\n"
        f"From rank {ranks_by_lines[usual][0]} (-) to rank {ranks_by_lines[other][0]} (+):{shown}{more}\n"
        "All ranks must build the same modules, with the same parameters in the same order, and shard them by the same "
        "calls with the same options."
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks by number, the first of them where they are many."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
