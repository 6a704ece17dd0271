"""The index of errors in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import error_index
from tests.helpers.error_index import PAGE, SECTIONS, IndexedError, indexed_errors, place_of, render


def test_the_page_is_made_from_the_code_and_has_every_error() -> None:
    found = list(indexed_errors())
    assert PAGE.read_text() == render(found), "make errors writes it anew"
    places = {place for section in SECTIONS.values() for place in section}
    assert {place_of(each.place) for each in found} == places
    assert len(found) > 300, "parts of the package were not read"


def test_a_text_is_a_cause_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "HOW = 'Call it first.'\n"
        "raise LifecycleError(f'{name!r} of v1.2 was not called. {HOW} Or ' 'leave it out.')\n"
        "raise MeshError(advice_of(3))\n"
        "warnings.warn('a long text | of one sentence', SomeWarning)\n"
        "raise ValueError('not ours, so not in the index')\n"
        "def advice_of(n):\n    return f'there are {n} ranks, not one.'\n"
    )
    (tmp_path / "module.py").write_text(source)
    monkeypatch.setattr(error_index, "PACKAGE", tmp_path)
    called, mesh, warning = indexed_errors()
    assert (called.kind, called.cause) == ("LifecycleError", "… of v1.2 was not called.")
    assert called.remedy == "Call it first. Or leave it out."
    assert mesh == IndexedError("MeshError", "module.py", "there are … ranks, not one.")
    assert mesh.remedy.startswith("Make [a mesh]")
    assert (warning.kind, warning.remedy) == ("SomeWarning", "Filter the warning if it is meant so.")
