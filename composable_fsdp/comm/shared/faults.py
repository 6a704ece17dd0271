"""What is told when ranks of one host cannot go on together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from composable_fsdp.comm.roll import order_text
from composable_fsdp.errors import DivergenceError, PeerError

__all__ = ["Peers"]


class Peers(NamedTuple):
    """The ranks of an axis, by their place on it.

    Args:
        ranks: their numbers in the whole job.
        processes: their process ids.
    """

    ranks: Sequence[int]
    processes: Sequence[int]

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def name(self, rank: int) -> str:
        return f"rank {self.ranks[rank]} (process {self.processes[rank]})"

    def gone(self, peer: int, reason: str, operation: object) -> PeerError:
        """``reason`` is what ``peer`` said when it gave up; empty if it said nothing."""
        consequence = f"so {operation} over {self} cannot be done."
        if reason:
            return PeerError(f"{self.name(peer)} gave up, {consequence} Why: {reason}")
        return PeerError(
            f"{self.name(peer)} is gone, {consequence} Its process has ended, or dropped the process group: look for "
            "the first error in its output."
        )

    def silent(self, silent: Iterable[int], seconds: float, operation: object, told: str) -> PeerError:
        """``silent`` did not answer in ``seconds``. ``told`` is what ranks say of themselves."""
        return PeerError(
            f"{', '.join(map(self.name, silent))} did not answer in {seconds:g} s, the timeout of the process group, "
            f"for which this rank waited in {operation} over {self}. If stuck, see where (`py-spy dump --pid ...`); if "
            f"slow, give the process group a longer timeout.{told}"
        )

    def stopped(self, reason: str) -> PeerError:
        """For calls after the first that failed."""
        return PeerError(f"{self} cannot go on together, since one of them gave up. Why: {reason}")

    def diverged(self, number: int, own: tuple[int, str], other: tuple[int, str]) -> DivergenceError:
        """Two ranks and what each launched as the operation ``number``."""
        about = {self.ranks[rank]: f"{what}, as operation {number} of {self}" for rank, what in (own, other)}
        return DivergenceError(order_text(about))
