"""Whether the files of a checkpoint are what was written: the work of ``verify``."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._dcp.directory import MANIFEST, candidates
from composable_fsdp.checkpoint._dcp.filesystem import read_metadata
from composable_fsdp.checkpoint._dcp.manifest import Manifest, check_file
from composable_fsdp.checkpoint._safetensors.reader import StoredTensors
from composable_fsdp.checkpoint._tools.dcp_items import archive_in
from composable_fsdp.checkpoint._tools.sources import Kind, kind_of
from composable_fsdp.errors import CheckpointError

__all__ = ["Verdict", "verify"]

_NO_CHECKSUMS = "safetensors have no checksums: bytes that changed within a tensor go unseen"


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    problems: a sentence for each file that is missing or damaged. Names it.
    files: how many were looked at.
    nbytes: of these.
    unchecked: what cannot be known, where the format has no checksums; empty if it has.
    """

    problems: tuple[str, ...]
    files: int
    nbytes: int
    unchecked: str = ""


@dataclass(frozen=True)
class _Check:
    """Of one file of ``nbytes``. ``run`` raises ``CheckpointError``."""

    nbytes: int
    run: Callable[[], None]


def verify(path: Path, *, progress: bool | None = None) -> Verdict:
    """Reads all files of the checkpoint at ``path``, or of all in the folder that it is.

    Those of :func:`~composable_fsdp.checkpoint.save` are compared with the manifest, those of ``torch.save`` and of
    ``torch.distributed.checkpoint`` with the checksums that their archives have inside. safetensors have none: headers
    and sizes are looked at.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    kind = kind_of(path)
    folders = candidates(path)[::-1] if kind is Kind.FOLDER else [path]
    checks: list[_Check] = []
    problems = [_problem(partial(_collect, kind, folder, checks)) for folder in folders]
    with progress_bar(wants_progress(progress), f"verifying {path.name}", sum(c.nbytes for c in checks)) as done:
        for check in checks:
            problems.append(_problem(check.run))
            done(check.nbytes)
    nbytes = sum(c.nbytes for c in checks)
    found = tuple(problem for problem in problems if problem)
    return Verdict(found, len(checks), nbytes, _NO_CHECKSUMS if kind is Kind.SAFETENSORS else "")


def _collect(kind: Kind, path: Path, checks: list[_Check]) -> None:
    checks += _CHECKS[kind](path)


def _problem(run: Callable[[], None]) -> str:
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return ""


def _of_ours(folder: Path) -> Iterator[_Check]:
    for name, record in Manifest.read(folder).files.items():
        yield _Check(record.bytes, partial(check_file, folder / name, record))


def _of_dcp(folder: Path) -> Iterator[_Check]:
    if (folder / MANIFEST).exists():
        yield from _of_ours(folder)
        return
    items: dict[str, list[tuple[int, int]]] = {}
    for stored in read_metadata(folder).storage_data.values():
        items.setdefault(stored.relative_path, []).append((stored.offset, stored.length))
    for name, spans in items.items():
        yield _Check(_end(spans), partial(_check_archives, folder / name, sorted(set(spans))))


def _end(spans: list[tuple[int, int]]) -> int:
    return max(offset + length for offset, length in spans)


def _check_archives(path: Path, spans: list[tuple[int, int]]) -> None:
    """Of a file in which DCP put what ``torch.save`` made of each item, one after the other."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    if size < _end(spans):
        raise CheckpointError(f"{path} has {size} bytes instead of {_end(spans)}: it is truncated or overwritten.")
    with path.open("rb") as file:
        for offset, length in spans:
            _check_archive(path, archive_in(file, offset, length), f" at byte {offset}")


def _check_archive(path: Path, archive: Path | IO[bytes], where: str = "") -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            bad = opened.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged{where}: {error}.") from error
    if bad is not None:
        raise CheckpointError(f"{path} is damaged{where}: the CRC-32 of its entry {bad} does not hold.")


def _of_torch(path: Path) -> Iterator[_Check]:
    yield _Check(path.stat().st_size, lambda: _check_archive(path, path))


def _of_safetensors(path: Path) -> Iterator[_Check]:
    for file in sorted({found.file for found in StoredTensors.at(path).tensors.values()}):
        yield _Check(file.stat().st_size, lambda: None)  # its header and size held when it was opened


_CHECKS: dict[Kind, Callable[[Path], Iterator[_Check]]] = {
    Kind.FOLDER: _of_ours,
    Kind.DCP: _of_dcp,
    Kind.TORCH: _of_torch,
    Kind.SAFETENSORS: _of_safetensors,
}
