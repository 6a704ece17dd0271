"""Search for damaged files and for the newest intact checkpoint of a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.manifest import FileRecord, Manifest, body_of, check_file
from composable_fsdp.errors import CheckpointError

__all__ = ["damage_text", "latest", "problem_of", "problems_of", "read_manifest", "share_of"]

logger = logging.getLogger(__name__)


def latest(path: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """Return the newest complete checkpoint in the folder ``path``, the one of the highest step; ``None`` if there is
    none.

    Not collective. Without ``verify`` it only lists the folder.

    Args:
        path: a folder of checkpoints.
        verify: return the newest checkpoint whose files have the recorded sizes and checksums. Damaged ones are logged
            as a warning. This process then reads all of that checkpoint, and newer ones up to their first damaged file.
            Call it on one process only, or use ``load(path, ..., fallback=True)``, where each rank reads a share.

    Raises:
        CheckpointError: with ``verify``, no checkpoint is intact, though there are some; the text lists the damage. Or
            one has a newer format.
    """
    if not verify:
        return next(reversed(folder.complete(path).values()), None)
    damaged: dict[str, str] = {}
    for candidate in folder.candidates(path):
        problem = next(problems_of(candidate), "")
        if not problem:
            if damaged:
                logger.warning("%s is the newest intact checkpoint. Damaged:%s", candidate, damage_text(damaged))
            return candidate
        damaged[candidate.name] = problem
    if damaged:
        raise CheckpointError(f"no checkpoint in {path} is intact:{damage_text(damaged)}")
    return None


def damage_text(damaged: dict[str, str]) -> str:
    """Return one line for each damaged checkpoint, by name."""
    return "".join(f"\n  {name}: {problem}" for name, problem in damaged.items())


def read_manifest(checkpoint: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of ``checkpoint`` and an empty text, or ``None`` and the damage.

    Raises:
        CheckpointError: the manifest has a newer format, which does not count as damage.
    """
    try:
        body_of(checkpoint)
    except CheckpointError as error:
        return None, str(error)
    return Manifest.read(checkpoint), ""


def share_of(manifest: Manifest, rank: int = 0, ranks: int = 1) -> dict[str, FileRecord]:
    """Return the files that ``rank`` of ``ranks`` checks: each file once, about the same number of bytes per rank."""
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    return dict(by_size[rank::ranks])


def problem_of(
    checkpoint: Path, files: dict[str, FileRecord], *, contents: bool, done: Callable[[int], None] = lambda count: None
) -> str:
    """Describe the first damage in the ``files`` of ``checkpoint``; empty if they are intact.

    Args:
        checkpoint: a directory.
        files: records of the files by name.
        contents: compare checksums too; otherwise only sizes.
        done: called with the size of each file in bytes after it was checked.
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
        CheckpointError: the manifest has a newer format.
    """
    manifest, problem = read_manifest(checkpoint)
    if manifest is None:
        yield problem
        return
    found = (problem_of(checkpoint, {name: record}, contents=contents) for name, record in share_of(manifest).items())
    yield from filter(None, found)
