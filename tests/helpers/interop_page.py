"""``python -m tests.helpers.interop_page`` writes ``docs/generated/interop.md``: state exchanged with torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from tests.helpers.interop import COLUMNS, MESHES, NOTES, OPTIMIZERS, WHOLE, Note, error_of_fsdp2, outcomes
from tests.helpers.run_ranks import run_ranks, shutdown

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "interop.md"

Row = dict[str, set[frozenset[Note]]]
"""The notes of each exchange of a column, by the column's title."""

_HEAD = """\
# Exchanged with torch's functions

<!-- page -->

Made by `python -m tests.helpers.interop_page` on {date}, with torch {torch} on CPU with gloo and
pytorch_optimizer {pytorch_optimizer}. `tests/ranks/test_interop.py` runs a part of it.

Each optimizer takes three steps of a model with a buffer, a frozen parameter and two groups with settings of their
own. The state then goes into a model and an optimizer with other values. "bits" means: parameters, buffers and state,
gathered in full, and settings are those before the exchange, and are the same in both models after one more step of
both with the same gradients. Each cell is about all of {meshes}.
FSDP2 is torch's `fully_shard` on the same mesh. The unsharded model is whole on every rank.

| column | state goes |
|---|---|
| A | from `save` to `dcp.load` and `set_state_dict`, into FSDP2, our sharded model and the unsharded model |
| B | from `get_state_dict` and `dcp.save` of each of these three to our `load` |
| C | from `get_state_dict` to `set_state_dict`, in memory: from ours to FSDP2, from FSDP2 to ours, from ours to ours |
| D | the same with `full_state_dict=True`, between ours and the unsharded model, both ways |
| E | from `save` to our `load` into FSDP2 and the unsharded model |
| F | from our full state dicts to `set_state_dict` of the unsharded model, and from its `get_state_dict` to ours |

"flattened" is `flatten_optimizer_state_dict=True` of torch's options. A number is that of a note below.
In each such exchange torch's functions alone do the same with FSDP2 in the place of this library, in the same run;
whether rounding differs (6, 7) depends on the values too.
"""

_WHOLE = """\
`AdamW8bit` is that of torchao {torchao}, on a wider model: only larger shards have 8-bit state. {names} step
by [`owner_step`](how-to/optimizers.md), on
FSDP2 too; the step of SOAP that is compared has no new decomposition, whose rounding depends on how eigenvectors lie in
memory. Without `owner_step`, FSDP2 of this torch cannot step them on any of the meshes:
"""


def measured() -> dict[str, Row]:
    """Run all exchanges, and return a row for each optimizer."""
    rows: dict[str, Row] = {}
    pairs = [(column, way) for column in COLUMNS for way in column.ways]
    for mesh, ranks in MESHES.items():
        for name in OPTIMIZERS:
            cells = [(name, way, column.form) for column, way in pairs]
            with tempfile.TemporaryDirectory() as folder:
                found = run_ranks(outcomes, ranks, mesh, cells, Path(folder), timeout=600)[0]
            row = rows.setdefault(name, {})
            for (column, _), notes in zip(pairs, found, strict=True):
                row.setdefault(column.title, set()).add(frozenset(notes))
    return rows


def errors() -> dict[str, set[str]]:
    """Return the errors of torch's FSDP2 on all meshes, by optimizer of whole parameters."""
    found = {
        name: {run_ranks(error_of_fsdp2, ranks, mesh, name)[0] for mesh, ranks in MESHES.items()} for name in WHOLE
    }
    if any("" in texts for texts in found.values()):
        raise AssertionError(f"FSDP2 steps some of these without owner_step: {found}. Say on which meshes.")
    return {name: {text.split(". ")[0].split(", need")[0] for text in texts} for name, texts in found.items()}


def render(rows: dict[str, Row], without: dict[str, set[str]]) -> str:
    """Return the text of the page."""
    versions = {name: version(name) for name in ("torch", "pytorch_optimizer")}
    numbers = {note: str(number) for number, note in enumerate(NOTES, 1)}
    head = _HEAD.format(date=datetime.now(timezone.utc).date(), meshes=_listed(list(MESHES)), **versions)
    titles = [column.title for column in COLUMNS]
    lines = [f"| optimizer | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(_cell(row[title], numbers) for title in titles)} |" for name, row in rows.items()
    ]
    notes = [f"{number}. {note.text}" for note, number in numbers.items()]
    whole = [_WHOLE.format(names=_listed(list(without)), torchao=version("torchao"))]
    whole += [f"- {name}: `{text}`" for name, texts in without.items() for text in sorted(texts)]
    return "\n".join([head, *lines, "", *notes, "", *whole, ""])


def _cell(found: Iterable[frozenset[Note]], numbers: dict[Note, str]) -> str:
    notes = sorted({numbers[note] for each in found for note in each})
    return ", ".join(["bits"] * (frozenset() in found) + notes)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def main() -> None:
    PAGE.write_text(render(measured(), errors()))
    shutdown()


if __name__ == "__main__":
    main()
