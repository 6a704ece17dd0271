"""What is told when ranks of one host cannot go on together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from composable_fsdp._consistency.rank_report import RankReport, order_text, reports_text
from composable_fsdp._consistency.running_pass import said_of
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError

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

    def gone(self, peer: int, reason: str, operation: object, last_known: str) -> PeerError:
        """Of the end of ``peer``.

        Args:
            peer: whose connection has ended.
            reason: what it said about that, as :meth:`farewell` or in its last report; empty if it said nothing.
            operation: of this rank, which needs ``peer``.
            last_known: the last operation that ``peer`` is known to have launched, if any.
        """
        if reason:
            return PeerError(f"{operation} over {self} cannot be done: {reason}{'' if reason.endswith('.') else '.'}")
        return PeerError(
            f"{self.name(peer)} is gone, so {operation} over {self} cannot be done. Its process has ended, or dropped "
            f"the process group: look for the first error in its output.{self._roll({}, {peer: last_known})}"
        )

    def farewell(self, rank: int, error: BaseException, operation: object) -> str:
        """What ``rank`` tells the others when ``error`` ends its part, in ``operation``."""
        if isinstance(error, FSDPError):
            return f"{self.name(rank)} gave up: {error}"
        return f"{self.name(rank)} raised {said_of(error)} in {operation}"

    def silent(
        self, last_known: Mapping[int, str], seconds: float, operation: object, reports: Mapping[int, RankReport]
    ) -> PeerError:
        """Of peers that did not answer in ``seconds``.

        Args:
            last_known: these peers, and the last operation that each is known to have launched, if any.
            seconds: of waiting.
            operation: of this rank, which waited.
            reports: of the ranks that answer the roll call, by their numbers in the whole job.
        """
        return PeerError(
            f"{', '.join(map(self.name, last_known))} did not answer in {seconds:g} s, the timeout of the process "
            f"group, for which this rank waited in {operation} over {self}. If stuck, see where (`py-spy dump --pid "
            f"...`); if slow, give the process group a longer timeout.{self._roll(reports, last_known)}"
        )

    def _roll(self, reports: Mapping[int, RankReport], last_known: Mapping[int, str]) -> str:
        return reports_text(
            reports, {self.ranks[peer]: operation for peer, operation in last_known.items() if operation}
        )

    def stopped(self, reason: str) -> PeerError:
        """For calls after the first that failed."""
        return PeerError(f"{self} cannot go on together, since {reason}")

    def diverged(self, number: int, own: tuple[int, str], other: tuple[int, str]) -> DivergenceError:
        """Two ranks and what each launched as the operation ``number``."""
        about = {self.ranks[rank]: f"{what}, as operation {number} of {self}" for rank, what in (own, other)}
        return DivergenceError(order_text(about))
