"""Rendezvous of ranks over a store, for ranks that have no connections to each other, or broken ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["StoreRendezvous", "Verdict"]

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
