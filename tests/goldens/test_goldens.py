"""A record depends only on the case, and a comparison notices changes of the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._internals import BucketReduceScatter, FSDPState, ReducedBucket, Root, schedule
from tests.goldens.cases import Found, known_programs
from tests.goldens.chosen import CHOSEN
from tests.goldens.observe import PORTABLE, Digest, Observation, observe_programs
from tests.goldens.records import UNSTABLE, Key, Record, differences, read, stable, write
from tests.helpers.fuzz.programs import Program
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import SOCKETS, TRANSPORTS

RECORDED = {
    name: program for name, program in known_programs().items() if program.world_size == 2 and int(name) % 100 == 90
}
SOME = {name: program for name, program in known_programs().items() if program.world_size == 2 and int(name) < 12}


def free_after_every_forward(self: Root, state: FSDPState, run: Any, *, has_grad: bool) -> None:
    if not state.is_in_use:
        self.launcher.free(state.group)  # so that backward gathers parameters that should have been kept


def fuse_nothing(*args: object) -> dict[str, tuple[str, ...]]:
    return {}


def flip_bits(self: BucketReduceScatter, *args: Any) -> ReducedBucket:
    reduced = FINISH(self, *args)
    for local in reduced.gradients:
        if local.numel():
            local.view(-1).view(torch.uint8)[0] ^= 1
    return reduced


FINISH = BucketReduceScatter.finish
BREAKAGES: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "free_after_forward": (Root, free_after_every_forward, "collective:all-gather"),
    "fusions": (schedule, fuse_nothing, "collective:all-gather"),
    "finish": (BucketReduceScatter, flip_bits, "results"),
}
"""Maps each replaced name to its owner, the replacement, and the difference that must be found."""


def observe_broken(name: str, programs: Sequence[Program]) -> list[Observation | Digest]:
    owner, broken, _ = BREAKAGES[name]
    intact = getattr(owner, name)
    setattr(owner, name, broken)
    try:
        return observe_programs(programs)
    finally:
        setattr(owner, name, intact)


def recorded(function: Callable[..., list[Observation | Digest]], *args: object) -> list[Record]:
    """Return the records of the programs in ``args``, on sockets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = run_ranks(function, 2, *args, environment={**SOCKETS, **PORTABLE})
    found = Found()
    for i, each in enumerate(zip(*seen, strict=True)):
        found.add(Key(str(i), "sockets"), each)
    return list(found.records.values())


@cache
def recorded_intact() -> list[Record]:
    return recorded(observe_programs, list(SOME.values()))


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_change_of_the_library_is_noticed(name: str) -> None:
    before = recorded_intact()
    after = recorded(observe_broken, name, list(SOME.values()))
    changes = [change for pair in zip(before, after, strict=True) for change in differences(*pair)]
    assert any(change.startswith(BREAKAGES[name][2]) for change in changes), changes
    if name == "finish":
        assert set(changes) == {"results"}


def test_a_record_does_not_depend_on_what_ran_before() -> None:
    forth = recorded(observe_programs, list(SOME.values()))
    back = recorded(observe_programs, list(SOME.values())[::-1])[::-1]
    assert forth == back
    assert recorded(observe_programs, list(SOME.values())[-1:]) == forth[-1:]


def test_programs_do_what_the_record_says() -> None:
    """Results are left out: their bits are valid for some processors."""
    records, _ = read()
    now = dict(zip(RECORDED, recorded(observe_programs, list(RECORDED.values())), strict=True))
    changes = {name: differences(records[Key(name, "sockets")], now[name]) for name in RECORDED}
    assert {name: found for name, found in changes.items() if set(found) - {"results"}} == {}


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    abc = {"events": "a", "labels": "b", "results": "c"}
    known = {
        Key("17", "sockets"): Record(abc, {"collective:all-gather": (3, 48), "wait": (2, 0)}),
        Key("test_x[1-a b] #2", "its own"): Record(abc | {"labels": "-"}, {}),
        Key("18", "copies"): Record({}, {}),
    }
    write(known, "commit abc", tmp_path / "records.txt")
    assert read(tmp_path / "records.txt") == (known, "commit abc")


def test_values_that_vary_between_recordings_are_not_compared() -> None:
    first = Record({"events": "a", "labels": "b"}, {"wait": (2, 0)})
    second = Record({"events": "a", "labels": "x"}, {"wait": (3, 0)})
    key = Key("17", "sockets")
    kept = stable({key: first}, {key: second})[key]
    assert kept.hashes == {"events": "a", "labels": UNSTABLE}
    assert differences(kept, first) == differences(kept, second) == []
    assert differences(kept, Record({"events": "y", "labels": "z"}, {})) == ["events"]
    assert differences(first, second) == ["labels", "wait 2 of 0 bytes -> 3 of 0 bytes"]
    assert differences(first, Record({}, {})) == ["failed now"]


def test_programs_and_records_belong_together() -> None:
    records, _ = read()
    of_programs = {key.case for key in records if key.case.isdecimal()}
    assert of_programs
    assert of_programs <= known_programs().keys()
    assert {Key(name, transport) for name in of_programs for transport in TRANSPORTS} <= records.keys()


def test_all_chosen_tests_exist() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name in CHOSEN if f"def {name}(" not in text] == []
