"""Integrity checks of checkpoint files: the work of the ``verify`` command."""

from __future__ import annotations

import io
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
from composable_fsdp.checkpoint._safetensors.files import StoredTensors
from composable_fsdp.checkpoint._tools.sources import Kind, kind_of
from composable_fsdp.errors import CheckpointError

__all__ = ["VerifyResult", "verify"]

_NO_CHECKSUMS = "safetensors have no checksums: bytes that changed within a tensor go unseen"


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of verifying a checkpoint.

    Attributes:
        problems: a sentence for each file that is missing or damaged, with its name.
        files: number of files checked.
        nbytes: bytes of these files.
        unchecked: damage that the format cannot detect for lack of checksums; empty if it has them.
    """

    problems: tuple[str, ...]
    files: int
    nbytes: int
    unchecked: str = ""


_FileCheck = tuple[int, Callable[[], None]]
"""The size of a file in bytes, and its check, which raises ``CheckpointError``."""


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
    checks: list[_FileCheck] = []
    problems = [_problem(partial(_collect_checks, kind, folder, checks)) for folder in folders]
    nbytes = sum(size for size, _ in checks)
    with progress_bar(wants_progress(progress), f"verifying {path.name}", nbytes) as done:
        for size, check in checks:
            problems.append(_problem(check))
            done(size)
    found = tuple(problem for problem in problems if problem)
    return VerifyResult(found, len(checks), nbytes, _NO_CHECKSUMS if kind is Kind.SAFETENSORS else "")


def _collect_checks(kind: Kind, path: Path, checks: list[_FileCheck]) -> None:
    checks += _CHECKS[kind](path)


def _problem(run: Callable[[], None]) -> str:
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return ""


def _manifest_checks(folder: Path) -> Iterator[_FileCheck]:
    for name, record in Manifest.read(folder).files.items():
        yield record.bytes, partial(check_file, folder / name, record)


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


def _check_archives(path: Path, spans: list[tuple[int, int]]) -> None:
    """Check a DCP file, in which the archives of ``torch.save`` follow one another."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    if size < _end(spans):
        raise CheckpointError(f"{path} has {size} bytes instead of {_end(spans)}: it is truncated or overwritten.")
    with path.open("rb") as file:
        for offset, length in spans:
            file.seek(offset)
            _check_archive(path, io.BytesIO(file.read(length)), f" at byte {offset}")


def _check_archive(path: Path, archive: Path | IO[bytes], where: str = "") -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            bad = opened.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged{where}: {error}.") from error
    if bad is not None:
        raise CheckpointError(f"{path} is damaged{where}: the CRC-32 of its entry {bad} does not hold.")


def _torch_checks(path: Path) -> Iterator[_FileCheck]:
    yield path.stat().st_size, lambda: _check_archive(path, path)


def _safetensors_checks(path: Path) -> Iterator[_FileCheck]:
    for file in sorted({found.file for found in StoredTensors.at(path).tensors.values()}):
        yield file.stat().st_size, lambda: None  # StoredTensors.at has checked header and size


_CHECKS: dict[Kind, Callable[[Path], Iterator[_FileCheck]]] = {
    Kind.FOLDER: _manifest_checks,
    Kind.DCP: _dcp_checks,
    Kind.TORCH: _torch_checks,
    Kind.SAFETENSORS: _safetensors_checks,
}
