"""Errors for ranks of one host that cannot continue together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from composable_fsdp._consistency.rank_report import LOOK, RankReport, error_summary, order_text, reports_text
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError


class Peers(NamedTuple):
    """The ranks of an axis, by their index on it.

    Args:
        ranks: their global ranks.
        processes: their process ids.
    """

    ranks: Sequence[int]
    processes: Sequence[int]

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def name(self, rank: int) -> str:
        return f"rank {self.ranks[rank]} (process {self.processes[rank]})"

    def gone_error(self, peer: int, reason: str, operation: object, last_known: str, exit_text: str) -> PeerError:
        """Return the error for a closed connection to ``peer``.

        Args:
            peer: the peer whose connection is closed.
            reason: the peer's :meth:`failure_text` or last report, empty if there is none.
            operation: this rank's operation, which needs ``peer``.
            last_known: the last operation that ``peer`` is known to have launched, if any.
            exit_text: the signal that ended its process, if known.
        """
        if reason:
            end = "" if reason.endswith(".") else "."
            return PeerError(f"{operation} over {self} cannot be done: {reason}{end}", [self.ranks[peer]])
        known = self._reports_text({}, {peer: last_known})
        return PeerError(
            f"{self.name(peer)} is gone{exit_text}, so {operation} over {self} cannot be done. Its process "
            f"has ended, or dropped the process group. {LOOK.format('its')}{known}",
            [self.ranks[peer]],
        )

    def failure_text(self, rank: int, error: BaseException, operation: object) -> str:
        """Return what ``rank`` sends to its peers when ``error`` in ``operation`` ends its part."""
        if isinstance(error, FSDPError):
            return f"{self.name(rank)} gave up: {error}"
        return f"{self.name(rank)} raised {error_summary(error)} in {operation}"

    def timeout_error(
        self, last_known: Mapping[int, str], seconds: float, operation: object, reports: Mapping[int, RankReport]
    ) -> PeerError:
        """Return the error for peers that did not answer in time.

        Args:
            last_known: the last operation that each of these peers is known to have launched, if any.
            seconds: the timeout.
            operation: this rank's operation, which waited.
            reports: rank reports of those that answered, by global rank.
        """
        return PeerError(
            f"{', '.join(map(self.name, last_known))} did not answer in {seconds:g} s, the timeout of the process "
            f"group, for which this rank waited in {operation} over {self}. If stuck, see where (`py-spy dump --pid "
            f"...`); if slow, give the process group a longer timeout.{self._reports_text(reports, last_known)}",
            [self.ranks[peer] for peer in last_known],
        )

    def _reports_text(self, reports: Mapping[int, RankReport], last_known: Mapping[int, str]) -> str:
        return reports_text(
            reports, {self.ranks[peer]: operation for peer, operation in last_known.items() if operation}
        )

    def order_error(self, number: int, own: tuple[int, str], other: tuple[int, str]) -> DivergenceError:
        """Return the error for two ranks that launched different operations as number ``number``."""
        about = {self.ranks[rank]: f"{label}, as operation {number} of {self}" for rank, label in (own, other)}
        return DivergenceError(order_text(about))
