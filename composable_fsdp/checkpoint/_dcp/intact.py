"""Which checkpoints of a folder are intact, and what is damaged of the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.manifest import FileRecord, Manifest, body_of, check_file
from composable_fsdp.errors import CheckpointError

__all__ = ["latest", "listed", "problem_of", "problems_of", "read_manifest", "share_of"]

logger = logging.getLogger(__name__)


def latest(path: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """The newest complete checkpoint in the folder ``path``: that of the highest step. ``None`` if there is none.

    Not collective. Without ``verify`` it costs no more than listing the folder.

    Args:
        path: a folder of checkpoints.
        verify: the newest one whose files are intact, by their sizes and checksums. Damaged ones are logged as a
            warning. This process reads all of that checkpoint, and of newer ones up to the first damaged file: let one
            process do it, or call ``load(path, ..., fallback=True)``, where each rank reads a share.

    Raises:
        CheckpointError: ``verify``, and there are checkpoints, but none is intact. What is damaged is in the text. Or
            one is of a newer format.
    """
    if not verify:
        return next(reversed(folder.complete(path).values()), None)
    damaged: dict[str, str] = {}
    for candidate in folder.candidates(path):
        problem = next(problems_of(candidate), "")
        if not problem:
            if damaged:
                logger.warning("%s is the newest intact checkpoint. Damaged:%s", candidate, listed(damaged))
            return candidate
        damaged[candidate.name] = problem
    if damaged:
        raise CheckpointError(f"no checkpoint in {path} is intact:{listed(damaged)}")
    return None


def listed(damaged: dict[str, str]) -> str:
    """Checkpoints by name, with what is damaged of each."""
    return "".join(f"\n  {name}: {problem}" for name, problem in damaged.items())


def read_manifest(checkpoint: Path) -> tuple[Manifest | None, str]:
    """The manifest of ``checkpoint``, or else what is damaged of it.

    Raises:
        CheckpointError: it is of a newer format, which is no damage.
    """
    try:
        body_of(checkpoint)
    except CheckpointError as error:
        return None, str(error)
    return Manifest.read(checkpoint), ""


def share_of(manifest: Manifest, rank: int = 0, ranks: int = 1) -> dict[str, FileRecord]:
    """The files that one of ``ranks`` checks, so that each is checked once and all have about as many bytes."""
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    return dict(by_size[rank::ranks])


def problem_of(
    checkpoint: Path, files: dict[str, FileRecord], *, contents: bool, done: Callable[[int], None] = lambda count: None
) -> str:
    """Describe the first damage in the ``files`` of ``checkpoint``; empty if they are intact.

    Args:
        checkpoint: a directory.
        files: with their records.
        contents: compare checksums too; otherwise only sizes.
        done: is told the bytes of each file after it.
    """
    try:
        for name, record in files.items():
            check_file(checkpoint / name, record, contents=contents)
            done(record.bytes)
    except CheckpointError as error:
        return str(error)
    return ""


def problems_of(checkpoint: Path, *, contents: bool = True) -> Iterator[str]:
    """Describe the damage in ``checkpoint``, which ``save`` wrote: one sentence for each damaged file.

    Args:
        checkpoint: a directory.
        contents: compare checksums too, which reads all files; otherwise only their sizes.

    Raises:
        CheckpointError: it is of a newer format.
    """
    manifest, problem = read_manifest(checkpoint)
    if manifest is None:
        yield problem
        return
    found = (problem_of(checkpoint, {name: record}, contents=contents) for name, record in share_of(manifest).items())
    yield from filter(None, found)
