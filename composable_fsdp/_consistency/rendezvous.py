"""The store of the job, and the rendezvous of ranks over it, for ranks that have no connections, or broken ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# -- Rendezvous of ranks over a store, for ranks that have no connections to each other, or broken ones

_LONGEST_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rendezvous ended: the distinct notes with their ranks, or the missing ranks and why they are, if known."""

    notes: dict[str, list[int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    reason: str = ""


class StoreRendezvous:
    """The numbered rendezvous of ``rank`` with all of ``ranks`` over one store, with keys below ``name``.

    The last rank to arrive completes a rendezvous; a rank that has waited too long ends it. The store accepts only one
    of these verdicts, and all ranks follow it. A rank that comes to a rendezvous that ended without its note goes to
    the next one. A rank that left without a verdict, because the store failed, comes again to the same one.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._name, self._rank, self._ranks = name, rank, ranks
        self._number = 0
        self._old_keys: list[str] = []

    def meet(
        self, store: Any, note: str, seconds: float, explain: Callable[[Callable[[], list[int]]], str] = lambda _: ""
    ) -> Verdict:
        """Wait up to ``seconds`` until all ranks have come, each with a note.

        ``explain`` is called often meanwhile, with a function that finds the missing ranks. It returns a reason to wait
        no longer, or an empty text.
        """
        end = time.monotonic() + seconds
        own_keys = (self._rank, "arrived", "verdict") if self._rank == self._ranks[0] else (self._rank,)
        while True:
            prefix = f"{self._name}/{self._number}"
            verdict = self._attend(store, prefix, note, end, explain)
            self._number += 1
            if has_met := self._rank in verdict.notes.get(note, ()):
                for key in self._old_keys:  # which no rank reads: all have come to a later rendezvous
                    store.delete_key(key)
                self._old_keys.clear()
            self._old_keys += [f"{prefix}/{key}" for key in own_keys]
            if has_met or (verdict.missing and self._rank not in verdict.missing):
                return verdict

    def _attend(
        self, store: Any, prefix: str, note: str, end: float, explain: Callable[[Callable[[], list[int]]], str]
    ) -> Verdict:
        def missing() -> list[int]:
            if store.check([f"{prefix}/{rank}" for rank in self._ranks]):  # one request, if none is
                return []
            return [rank for rank in self._ranks if not store.check([f"{prefix}/{rank}"])]

        def decide(reason: str) -> None:
            verdict = Verdict(missing=missing(), reason=reason)
            for rank in self._ranks if not verdict.missing else ():
                verdict.notes.setdefault(store.get(f"{prefix}/{rank}").decode(), []).append(rank)
            store.compare_set(f"{prefix}/verdict", "", json.dumps(asdict(verdict)))

        store.set(f"{prefix}/{self._rank}", note)
        if store.add(f"{prefix}/arrived", 1) >= len(self._ranks) and not missing():  # a rank may have arrived twice
            decide("")
        pause = 0.001
        while not store.check([f"{prefix}/verdict"]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if (reason := explain(missing)) or time.monotonic() > end:
                decide(reason)
        return Verdict(**json.loads(store.get(f"{prefix}/verdict")))


# -- The key-value store of the current default process group, apart from earlier default groups of the job

_known: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.Store, dist.Store]] = WeakKeyDictionary()
"""The torch store of a default group and the one to use, by default group."""
_lock = threading.Lock()


def world_store() -> dist.Store:
    """Return the store of the default process group, with a prefix of its own for each default group.

    A job may destroy its default group and initialize another over the same store, and the store of torchrun survives a
    restart of the job. Keys stay in a store, so ranks would read what an earlier group has left. Each rank counts its
    default groups in the store itself: a process that replaces another goes on with the number of its rank.
    """
    world = dist.group.WORLD
    assert world is not None
    base = dist.distributed_c10d._get_default_store()
    with _lock:
        known = _known.get(world)
        if known is None or known[0] is not base:
            store = dist.PrefixStore(f"composable_fsdp/{_attempt()}", base)
            number = store.add(f"default groups of rank {dist.get_rank()}", 1)
            known = _known[world] = base, dist.PrefixStore(str(number), store)
        return known[1]


def own_client() -> dist.Store | None:
    """Return the store of :func:`world_store` by a connection of its own.

    All threads that use one client wait behind each other. So if two threads of each rank wait for keys of the other
    rank, neither may set its own. ``None`` if the store has no connections, as that of simulated ranks.
    """
    try:
        store: Any = world_store()
        base = store
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        # torch's ``FakeStore`` of simulated ranks takes keys and forgets them, from torch 2.14 on.
        client: dist.Store | None = None if type(base).__name__ == "FakeStore" else store.clone()
    except RuntimeError:  # torch before 2.14: "Tried to call pure virtual function"
        return None
    return client


def _attempt() -> str:
    """Return the number of this start of the job, if torchrun keeps its store over restarts; otherwise ``"0"``.

    Each host's torchrun counts for itself, so the numbers of hosts can differ. With a store for each attempt, as
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives, they must not matter.
    """
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps_store else "0"
