"""The text: Python's own standard library, which every machine that runs this has."""

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

# Not the library's own text, or text that some distributions ship apart, so that it would differ between machines.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION_SHARE = 20  # one file in so many


@dataclass(frozen=True, slots=True)
class Batch:
    """``inputs`` and ``targets``: (batch, seq), int64; a target is the byte that follows its input."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Text:
    """Some files, one after the other, as one tensor of bytes: a byte of memory per byte of text."""

    files: int
    data: Tensor

    def batch(self, key: str, *, batch: int, seq: int) -> Batch:
        """``batch`` windows of ``seq`` bytes, which depend on ``key`` and on nothing else.

        The key is hashed as text, so that (seed, step, rank) can not collide, as sums of the three would.
        """
        source = random.Random(key)
        starts = [source.randrange(len(self.data) - seq) for _ in range(batch)]
        windows = torch.stack([self.data[start : start + seq + 1] for start in starts]).long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to train on and text to validate on. Invariant: no file is in both."""

    training: Text
    validation: Text


def source_files(folder: Path) -> Iterator[Path]:
    """The Python files under ``folder``, in an order that is the same on every machine."""
    for path in sorted(folder.rglob("*.py"), key=lambda each: each.relative_to(folder).as_posix()):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path


def is_for_validation(name: str) -> bool:
    """Decided by the file's name alone: whether other files come or go changes nothing for this one."""
    return zlib.crc32(name.encode()) % VALIDATION_SHARE == 0


def load_corpus(*, seq: int) -> Corpus:
    """Read the standard library's sources, leaving out files that are not UTF-8.

    Raises:
        UsageError: there is too little text for windows of ``seq`` bytes, as where Python came without its sources.
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
    # A window may run from one file into the next, as it does in most language-model training.
    return Text(files=len(contents), data=torch.frombuffer(bytearray(b"\n".join(contents)), dtype=torch.uint8))
