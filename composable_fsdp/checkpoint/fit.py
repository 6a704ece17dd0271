"""How a checkpoint differs from what is to be loaded, as users read it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Misfit"]

_SHOWN = 20


@dataclass
class Misfit:
    """Attributes:
    missing: in the checkpoint, with what is wanted.
    unexpected: in the checkpoint, with what is there.
    shapes: with both.
    dtypes: with both.
    others: sentences.
    """

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @staticmethod
    def of_all(misfits: Iterable[Misfit]) -> Misfit:
        """That of all ranks: what any misses, and what none expects."""
        first, *rest = misfits
        total = Misfit(dict(first.missing), dict(first.unexpected), dict(first.shapes), dict(first.dtypes))
        total.others = list(first.others)
        for each in rest:
            total.missing |= each.missing
            total.shapes |= each.shapes
            total.dtypes |= each.dtypes
            total.others += [sentence for sentence in each.others if sentence not in total.others]
            total.unexpected = {key: what for key, what in total.unexpected.items() if key in each.unexpected}
        return total

    def is_fatal(self, *, strict: bool) -> bool:
        """Whether nothing may be loaded: with ``strict`` for any difference, else for shapes only."""
        everything = self.missing or self.unexpected or self.shapes or self.dtypes or self.others
        return bool(everything if strict else self.shapes)

    def __str__(self) -> str:
        parts = [
            *_listed("missing in the checkpoint", self.missing),
            *_listed("unexpected in the checkpoint", self.unexpected),
            *_listed("of another shape", self.shapes),
            *_listed("of another dtype", self.dtypes),
            *self.others,
        ]
        return "\n".join(f"  {part}" for part in parts)


def _listed(title: str, differences: Mapping[str, str]) -> list[str]:
    if not differences:
        return []
    shown = [f"    {name}: {what}" for name, what in list(differences.items())[:_SHOWN]]
    if len(differences) > _SHOWN:
        shown.append(f"    and {len(differences) - _SHOWN} more")
    return ["\n".join([f"{title} ({len(differences)}):", *shown])]
