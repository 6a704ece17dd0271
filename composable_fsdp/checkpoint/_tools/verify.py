"""Integrity checks of checkpoint files: the work of the ``verify`` command."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from composable_fsdp.checkpoint._coordination.arguments import progress_bar, wants_progress
from composable_fsdp.checkpoint._dcp.directory import MANIFEST, Manifest, candidates, problem_of
from composable_fsdp.checkpoint._dcp.storage import read_metadata
from composable_fsdp.checkpoint._safetensors.load_safetensors import StoredTensors
from composable_fsdp.checkpoint._tools.sources import Kind, kind_of
from composable_fsdp.errors import CheckpointError

__all__ = ["VerifyResult", "verify"]

_NO_CHECKSUMS = "safetensors have no checksums: bytes that changed within a tensor go unseen"


@dataclass(frozen=True)
class VerifyResult:
    """The checked files, and a sentence for each that is missing or damaged.

    ``unchecked`` says which damage the format cannot detect for lack of checksums; it is empty if it has them.
    """

    problems: tuple[str, ...]
    files: int
    nbytes: int
    unchecked: str = ""


_FileCheck = tuple[int, Callable[[], str]]
"""The size of a file in bytes, and its check, which returns a sentence about damage, or an empty text."""


def verify(path: Path, *, progress: bool | None = None) -> VerifyResult:
    """Read all files of the checkpoint at ``path``, or of all checkpoints in the folder ``path``.

    Files of :func:`~composable_fsdp.checkpoint.save` are compared with the manifest, those of ``torch.save`` and of
    ``torch.distributed.checkpoint`` with the checksums inside their archives. safetensors have no checksums: only
    headers and sizes are checked.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    kind = kind_of(path)
    folders = candidates(path)[::-1] if kind is Kind.FOLDER else [path]
    checks = [check for folder in folders for check in _checks_of(kind, folder)]
    problems = []
    nbytes = sum(size for size, _ in checks)
    with progress_bar(wants_progress(progress), f"verifying {path.name}", nbytes) as done:
        for size, check in checks:
            problems.append(check())
            done(size)
    found = tuple(problem for problem in problems if problem)
    return VerifyResult(found, len(checks), nbytes, _NO_CHECKSUMS if kind is Kind.SAFETENSORS else "")


def _checks_of(kind: Kind, path: Path) -> list[_FileCheck]:
    try:
        return list(_CHECKS[kind](path))
    except CheckpointError as error:
        problem = str(error)
        return [(0, lambda: problem)]


def _manifest_checks(folder: Path) -> Iterator[_FileCheck]:
    for name, record in Manifest.read(folder).files.items():
        yield record.bytes, partial(problem_of, folder / name, record)


def _dcp_checks(folder: Path) -> Iterator[_FileCheck]:
    if (folder / MANIFEST).exists():
        yield from _manifest_checks(folder)
        return
    items: dict[str, list[tuple[int, int]]] = {}
    for stored in read_metadata(folder).storage_data.values():
        items.setdefault(stored.relative_path, []).append((stored.offset, stored.length))
    for name, spans in items.items():
        yield _end(spans), partial(_check_archives, folder / name, sorted(set(spans)))


def _end(spans: list[tuple[int, int]]) -> int:
    return max(offset + length for offset, length in spans)


def _check_archives(path: Path, spans: list[tuple[int, int]]) -> str:
    """Check a DCP file, in which the archives of ``torch.save`` follow one another."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing."
    if size < _end(spans):
        return f"{path} has {size} bytes instead of {_end(spans)}: it is truncated or overwritten."
    with path.open("rb") as file:
        for offset, length in spans:
            file.seek(offset)
            if problem := _check_archive(path, io.BytesIO(file.read(length)), f" at byte {offset}"):
                return problem
    return ""


def _check_archive(path: Path, archive: Path | IO[bytes], where: str = "") -> str:
    try:
        with zipfile.ZipFile(archive) as opened:
            bad = opened.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        return f"{path} is damaged{where}: {error}."
    return "" if bad is None else f"{path} is damaged{where}: the CRC-32 of its entry {bad} does not hold."


def _torch_checks(path: Path) -> Iterator[_FileCheck]:
    yield path.stat().st_size, lambda: _check_archive(path, path)


def _safetensors_checks(path: Path) -> Iterator[_FileCheck]:
    for file in sorted({found.file for found in StoredTensors.at(path).tensors.values()}):
        yield file.stat().st_size, lambda: ""  # StoredTensors.at has checked header and size


_CHECKS: dict[Kind, Callable[[Path], Iterator[_FileCheck]]] = {
    Kind.FOLDER: _manifest_checks,
    Kind.DCP: _dcp_checks,
    Kind.TORCH: _torch_checks,
    Kind.SAFETENSORS: _safetensors_checks,
}
