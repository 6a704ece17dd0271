"""Coordination of all ranks during a save or load: rendezvous, exchange of Python objects, and common errors.

Ranks first rendezvous through the default store, before any collective, so a missing rank is reported by name and no
rank hangs (``_consistency/shutdown.py``). Then they exchange point-to-point messages with rank 0 over a gloo process
group of their own, which do not mix with the collectives of training; it outlives ``destroy_process_group``.

The second half is the error texts of wrong arguments, and of what all ranks found in a checkpoint or state dict.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._consistency.rendezvous import StoreRendezvous, world_store
from composable_fsdp._consistency.verify_ranks import check_versions, versions
from composable_fsdp._consistency.watchdog import MissingRanks, job_watchdog
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, FSDPError, printable

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = 1800.0
"""The default number of seconds that ranks wait for each other."""

_TAG = 6


class Failure(NamedTuple):
    """An error on one rank, in the form that is sent to the other ranks."""

    text: str
    kind: type[FSDPError] = CheckpointError

    @staticmethod
    def of(error: Exception) -> Failure:
        return Failure(str(error), type(error)) if isinstance(error, FSDPError) else Failure(said(error))

    @staticmethod
    def among(outcomes: Mapping[int, object]) -> Failure | None:
        """Return one failure with the texts of all that are ``outcomes`` of ranks, or ``None`` if there is none."""
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        text = join_rank_texts({rank: failure.text for rank, failure in failures.items()}, len(outcomes))
        return next((Failure(text, failure.kind) for failure in failures.values()), None)


@dataclass
class _JobRanks:
    """The rendezvous of checkpoints over the store of a default process group, and the process group that they use."""

    store: dist.Store
    rendezvous: StoreRendezvous
    group: dist.ProcessGroup | None = None


class RankGroup:
    """The ranks that take part in one save or load. Invariant: all of them make the same exchanges in the same order.

    ``timeout`` is the seconds to wait for another rank within an exchange. A single rank has no ``job``.
    """

    def __init__(self, rank: int, size: int, job: _JobRanks | None, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._job = job
        self._group: Any = job and job.group
        self._timeout = timeout

    def exchange(self, what: str, each: Callable[[], T], central: Callable[[list[T]], Sequence[R]]) -> R:
        """Call ``each`` on every rank and ``central`` with all results on rank 0, and return this rank's reply of it.

        Whatever can raise on one rank must be inside: others wait for each rank's outcome, also the outcome that cannot
        be pickled.

        Raises:
            FSDPError: ``each`` or ``central`` raised on some rank, or a rank was lost. All remaining ranks raise it,
                with the texts of all failures after ``what``. The type is that of the first failed rank if that is an
                ``FSDPError``, else ``CheckpointError``.
        """
        error: Exception | None = None
        reply: Any
        try:
            outcome: Any = each()
            data = pickle.dumps(outcome) if self.rank else b""
        except Exception as raised:
            error, outcome = raised, Failure.of(raised)
            data = pickle.dumps(outcome)
        if self.rank:
            reply = self._send(data, 0) or self._receive(0)
        else:
            outcomes = [outcome, *(self._receive(peer) for peer in range(1, self.size))]
            failure = Failure.among(dict(enumerate(outcomes)))
            try:
                replies: Sequence[Any] = central(outcomes) if failure is None else [failure] * self.size
                messages = [pickle.dumps(each) for each in replies[1:]]
            except Exception as raised:
                error, replies = raised, [Failure.of(raised)] * self.size
                messages = [pickle.dumps(each) for each in replies[1:]]
            reply = replies[0]
            for peer, data in enumerate(messages, 1):
                if lost := self._send(data, peer):  # the next exchange reports it to the others
                    logger.warning("rank %d: %s", peer, printable(lost.text))
        if isinstance(reply, Failure):
            raise reply.kind(f"{what}: {reply.text}") from _printable_causes(error)
        return cast(R, reply)

    def combine(self, what: str, each: Callable[[], T], central: Callable[[list[T]], R]) -> R:
        """As :meth:`exchange`, with one reply for all ranks."""
        return self.exchange(what, each, lambda results: [central(results)] * len(results))

    def agree(self, what: str, each: Callable[[], object] = lambda: None) -> None:
        """Call ``each`` on every rank and wait until all calls have returned."""
        self.combine(what, each, lambda results: None)

    def from_rank0(self, what: str, central: Callable[[], R]) -> R:
        return self.combine(what, lambda: None, lambda results: central())

    def _send(self, pickled: bytes, peer: int) -> Failure | None:
        data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        try:
            for message in (torch.tensor([data.numel()]), data):
                self._group.send([message], peer, _TAG).wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            return self._connection_lost(error)
        return None

    def _receive(self, peer: int) -> Any:
        """Return what ``peer`` sent, or a failure if it is lost."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            self._group.recv([length], peer, _TAG).wait(timedelta(seconds=self._timeout))
            data = torch.empty(int(length), dtype=torch.uint8)
            self._group.recv([data], peer, _TAG).wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            return self._connection_lost(error)
        try:
            return pickle.loads(data.numpy().data)
        except Exception as error:  # the code of any class
            return Failure(f"what rank {peer} sent cannot be unpickled ({said(error)})")

    def _connection_lost(self, error: RuntimeError) -> Failure:
        """Describe a failed connection. The process group is discarded, since it cannot be used again."""
        reason = (str(error).partition("] ")[2] or str(error)).partition(". ")[0]  # gloo: "[file:line] reason. advice"
        if self._job is not None:
            self._job.group = None
        rank = "rank 0: " if self.rank else ""  # rank 0 names the others
        return Failure(f"{rank}gone, or did not answer within {self._timeout:g} s ({reason})")


def _printable_causes(error: Exception | None) -> Exception | None:
    """Return ``error`` with texts that are printable, in it and its causes: Python prints all if nobody catches it.

    They are errors of torch, safetensors and pickle, with names of classes, dtypes and codecs from files.
    """
    following: list[BaseException | None] = [error]
    for each in following:
        if each is not None:
            each.args = tuple(printable(part) if isinstance(part, str) else part for part in each.args)
            following += [e for e in (each.__cause__, each.__context__) if all(e is not other for other in following)]
    return error


# -- asynchronous saves


class PendingSave(os.PathLike[str]):
    """The handle that ``save`` returns. It is also the path of the checkpoint, which is complete after :meth:`wait`.

    Attributes:
        path: directory of the checkpoint.
        step: training step of the checkpoint.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def done(self) -> bool:
        """Return True if the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> PendingSave:
        """Wait until the checkpoint is complete on all ranks.

        Call it before ``destroy_process_group`` if other ranks may exit before this rank has written its files.

        Raises:
            CheckpointError: the save failed. All ranks get the same error. It is raised once: here, or by the next save
                or load, including those of safetensors.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self

    def start(self, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread. The interpreter waits for this thread before it exits."""
        global _latest

        def run() -> None:
            try:
                action()
            except BaseException as error:
                logger.error("the checkpoint %s was not saved: %s", self.path, error)
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {self.path.name}")
        _latest = self
        self._thread.start()


_latest: PendingSave | None = None


def finish_earlier() -> None:
    """Wait for the save that is running, if any, and raise its error unless that was raised before."""
    global _latest
    earlier, _latest = _latest, None
    if earlier is not None:
        earlier.wait()


# -- rendezvous


_job_ranks: WeakKeyDictionary[dist.ProcessGroup, _JobRanks] = WeakKeyDictionary()


Arguments = tuple[Sequence[object], Mapping[str, object]]
"""The arguments of a call that must be equal on all ranks, by position and by keyword."""


def meet(function: Callable[..., object], check: Callable[[], Arguments], timeout: float) -> RankGroup:
    """Wait until all ranks of the default process group have made the same call, and their earlier save has ended.

    ``check`` checks the arguments of ``function``, and returns them. If it raises, the other ranks are told.

    An asynchronous save exchanges messages over the same group in a thread, so it has to end first.

    Raises:
        CheckpointError: ranks did not come in time or made another call, also one with other arguments. The text shows
            the call of each on every rank that came, without keyword arguments that are the default. Or the earlier
            save failed and its error has not been raised yet.
        Exception: ``check`` raised it, on all ranks alike.
    """
    try:
        given, arguments = check()
        usual: Mapping[str, object] = cast(Any, inspect.unwrap(function)).__kwdefaults__
        shown = [*map(repr, given), *(f"{name}={v!r}" for name, v in arguments.items() if v != usual[name])]
    except Exception as error:
        _join(f"a call that raised {said(error)}", timeout)
        raise
    call = f"{function.__name__}({', '.join(shown)})" if shown else function.__name__
    ranks = _join(call, timeout)
    ranks.agree(f"the save before {call}", finish_earlier)
    return ranks


def _join(call: str, timeout: float) -> RankGroup:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return RankGroup(0, 1, None, timeout)
    world = dist.group.WORLD
    assert world is not None
    store = world_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    job = _job_ranks.get(world)
    if job is None or job.store is not store:
        job = _job_ranks[world] = _JobRanks(store, StoreRendezvous("checkpoint", rank, range(size)))
    note = f"{job.group is not None:d} {versions()}\n{call}"
    missing = MissingRanks(job_watchdog(), call, timeout, range(size))
    try:
        verdict = job.rendezvous.meet(store, note, timeout, missing.explain)
    except dist.DistError as error:
        raise CheckpointError(f"{call}: the store of rank 0 cannot be reached any more ({error}).") from error
    if verdict.missing:
        reason = verdict.reason or f"{format_ranks(verdict.missing)} did not make this call within {timeout:g} s. "
        raise CheckpointError(f"{call}: {reason}All {size} ranks of the default process group must make it.")
    found: dict[int, str] = {}
    calls: dict[str, list[int]] = {}
    for note, ranks in verdict.notes.items():
        version, _, each = note[2:].partition("\n")
        found |= dict.fromkeys(ranks, version)
        calls.setdefault(each, []).extend(ranks)
    check_versions(found, CheckpointError)
    if len(calls) > 1:
        about = ", ".join(f"{format_ranks(sorted(ranks))} {each}" for each, ranks in calls.items())
        raise CheckpointError(f"the ranks did not make the same call: {about}. All must make it, with equal arguments.")
    if not all(note.startswith("1") for note in verdict.notes):
        job.group = dist.new_group(backend="gloo", group_desc="composable_fsdp checkpoints")
    return RankGroup(rank, size, job, timeout)


# -- error texts


_SHOWN = 20
_TITLES = {
    "missing": "missing",
    "unexpected": "unexpected",
    "shapes": "of another shape",
    "dtypes": "of another dtype",
    "classes": "of another tensor class, or with shards that cannot be resharded",
}


def check_arguments(signature: str, path: object, model: object) -> None:
    """Raise ``ArgumentTypeError``, which shows ``signature``, if a type is wrong, as when two arguments are swapped."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(model, nn.Module):
        kinds = f"{type(path).__name__} and {type(model).__name__}"
        raise ArgumentTypeError(f"path must be a str or a path, and model an nn.Module, not {kinds}. Call {signature}.")


def join_rank_texts(texts: Mapping[int, str], size: int) -> str:
    """Join the ``texts`` of ranks into one line; without rank numbers if all ``size`` ranks have the same text."""
    found = _grouped({rank: [text] for rank, text in texts.items()})
    if len(texts) == size and len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in found.items())


_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STACK = re.compile(r"\n\s*(Exception raised from |C\+\+ CapturedTraceback|frame #0: )")
_UNPICKLER = re.compile(r"WeightsUnpickler error: *(.*)")
_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")


def said(error: BaseException) -> str:
    """Return the type and text of ``error``, without terminal colours and without the C++ stack that torch appends."""
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
    return str(dtype).removeprefix("torch.")


def tensor_text(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def differ(found: object, expected: object) -> str:
    """Return the entry of a :class:`Mismatch` for a shape or dtype."""
    return f"{found}, expected {expected}"


@dataclass
class Mismatch:
    """Differences on one rank between the saved state and the state that it is loaded into.

    A mapping is from a tensor's name to a short description; ``missing`` are those that the saved state lacks.
    ``others`` are sentences.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def leave_common_unexpected(mismatches: Collection[Mismatch]) -> None:
    """Keep as unexpected only the tensors that no rank expects: ranks may hold different parts of a model."""
    common = set.intersection(*(set(mismatch.unexpected) for mismatch in mismatches))
    for mismatch in mismatches:
        mismatch.unexpected = {name: what for name, what in mismatch.unexpected.items() if name in common}


def mismatch_text(mismatches: Mapping[int, Mismatch], ignore: Collection[str] = ()) -> str:
    """Return the differences of all ranks by kind, without those in ``ignore``. Entries name their ranks if not all."""
    lines = []
    for kind, title in _TITLES.items():
        if kind in ignore:
            continue
        found = {rank: vars(each)[kind].items() for rank, each in mismatches.items()}
        entries = _marked({rank: [f"{name}: {what}" for name, what in items] for rank, items in found.items()})
        if entries:
            lines += [f"  {title} ({len(entries)}):", *(f"    {entry}" for entry in entries[:_SHOWN])]
        if len(entries) > _SHOWN:
            lines.append(f"    and {len(entries) - _SHOWN} more")
    if "others" not in ignore:
        lines += [f"  {sentence}" for sentence in _marked({rank: each.others for rank, each in mismatches.items()})]
    return "\n".join(lines)


def refuse(what: str, mismatches: Mapping[int, Mismatch], ignore: Collection[str] = ()) -> None:
    """Raise if any rank has differences that are not of kinds in ``ignore``; with equal arguments, the same error."""
    differences = mismatch_text(mismatches, ignore)
    if differences:
        raise CheckpointError(f"{what}. Nothing was loaded.\n{differences}")


def _grouped(texts: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, own in texts.items():
        for text in own:
            ranks.setdefault(text, []).append(rank)
    return ranks


def _marked(texts: Mapping[int, Iterable[str]]) -> list[str]:
    found = _grouped(texts).items()
    return [text if len(ranks) == len(texts) else f"{text} (on {format_ranks(ranks)})" for text, ranks in found]
