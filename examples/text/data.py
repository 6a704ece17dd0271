"""Provides the text for training: Python's own standard library, which is on every machine."""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .options import UsageError

# Excluded are other libraries' text, and text that some distributions ship separately, which differs between machines.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION_SHARE = 20  # one of this many files is for validation


@dataclass(frozen=True, slots=True)
class Batch:
    """``inputs`` and ``targets``: (batch, seq), int64. A target is the byte after its input."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Text:
    """Concatenated files as one tensor of bytes, with one byte of memory per byte of text."""

    files: int
    data: Tensor

    def batch(self, key: str, *, batch: int, seq: int) -> Batch:
        """Return ``batch`` windows of ``seq`` bytes, which depend only on ``key``.

        The key is hashed as text. Sums of seed, step and rank could collide.
        """
        source = random.Random(key)
        starts = [source.randrange(len(self.data) - seq) for _ in range(batch)]
        windows = torch.stack([self.data[start : start + seq + 1] for start in starts]).long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text for training and text for validation. Invariant: no file is in both."""

    training: Text
    validation: Text


def source_files(folder: Path) -> Iterator[Path]:
    """Return the Python files under ``folder``, in an order that is the same on every machine."""
    for path in sorted(folder.rglob("*.py"), key=lambda each: each.relative_to(folder).as_posix()):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path


def is_for_validation(name: str) -> bool:
    """Return whether a file is for validation. This depends only on its name, not on other files."""
    return zlib.crc32(name.encode()) % VALIDATION_SHARE == 0


def load_corpus(*, seq: int) -> Corpus:
    """Read the standard library's sources, leaving out files that are not UTF-8.

    Raises:
        UsageError: there is too little text for windows of ``seq`` bytes, for example if Python has no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in source_files(folder):
        content = path.read_bytes()
        if _is_text(content):
            parts[is_for_validation(path.relative_to(folder).as_posix())].append(content)
    corpus = Corpus(training=_join(parts[False]), validation=_join(parts[True]))
    if min(len(corpus.training.data), len(corpus.validation.data)) <= seq:
        raise UsageError(f"too little Python source in {folder} for --seq {seq}: use a shorter one, or a full Python")
    return corpus


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _join(contents: list[bytes]) -> Text:
    # A window may contain the end of one file and the beginning of the next, as is usual for language models.
    return Text(files=len(contents), data=torch.frombuffer(bytearray(b"\n".join(contents)), dtype=torch.uint8))
