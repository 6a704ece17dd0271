"""Checks that randomly drawn programs train equally with and without sharding.

CI draws the same programs as long as the sources are unchanged. For more programs, different in every run:

    FUZZ_PROGRAMS=10000 python -m pytest tests/parity/test_fuzz.py -k train --timeout=0

The test prints its seed, and finally the number of programs that used each feature. ``FUZZ_SEED`` repeats a run. Some
programs run in parallel with another one, in two threads of each rank. A failure shows the smallest program that
hypothesis found. ``run_alone(...)`` runs it again.

All programs are drawn first and run in batches, since a call of ``run_ranks`` takes as long as a program. If a program
fails, hypothesis draws the same programs again, uses the known results, and shrinks the failing program.

CI leaves out the longest of the programs that it draws, but none whose features fewer than ``FLOOR`` others have.
Longer runs train all of them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.distributed.tensor import DTensor

from tests._internals import (
    Bucket,
    BucketReducer,
    CachedMessage,
    Encoder,
    ModelParallel,
    OptimizerSteps,
    ParamGroup,
    Reduction,
    Root,
)
from tests.helpers.fuzz.draw import programs
from tests.helpers.fuzz.features import FEATURES, features
from tests.helpers.fuzz.fixed import FIXED
from tests.helpers.fuzz.programs import Block, Leaf, Program, ShardCall, Step, module_calls
from tests.helpers.fuzz.reference import differences
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import kill_ranks, run_ranks
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment

DRAW_SIZE = 1000
"""The number of programs that are drawn from one seed."""

BATCH = 150
"""The number of programs in one call of ``run_ranks``."""

SHRINKING = 60.0
"""The time limit for shrinking, in seconds."""

ONE_IN = 8
"""One in so many programs is trained in parallel with the program before it, in a second thread of each rank.

Programs whose DTensors communicate are excluded: torch caches communication by equal meshes, so that one thread would
use the process groups of the other thread's mesh.
"""

IN_CI = {2: 260, 4: 20}
"""The number of drawn programs by number of ranks. Longer runs use the same proportions."""

LONG = 150
"""The number of module calls from which on CI may leave a program out."""

FLOOR = 5
"""The number of programs in CI that have each feature, at least."""


@dataclass(frozen=True)
class DrawnPrograms:
    """Programs that are drawn from one seed. The same seed gives the same programs; CI uses ``None``."""

    size: int
    world_size: int
    seed: int | None = None

    def each(self, check: Callable[[Program], None], *phases: Phase) -> None:
        """Call ``check`` with drawn programs. Hypothesis repeats some, so more than ``size`` are drawn."""

        @settings(
            max_examples=self.size * 3 // 2,
            derandomize=self.seed is None,
            database=None,
            phases=(Phase.generate, *phases),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(self.world_size))
        def test(program: Program) -> None:
            check(program)

        (test if self.seed is None else seed(self.seed)(test))()

    def programs(self) -> list[Program]:
        """Return the first ``size`` different programs, some of them as parallel pairs."""
        return list(self.map_drawn().values())

    def map_drawn(self) -> dict[Program, Program]:
        found: dict[Program, None] = {}
        self.each(found.setdefault)
        drawn = {program: program for program in list(found)[: self.size]}
        fit = [program for program in drawn if program.placing is None]
        return drawn | {fit[i]: beside(fit[i], fit[i - 1]) for i in range(1, len(fit), ONE_IN)}


def beside(program: Program, second: Program) -> Program:
    """Return a program that runs both programs in two threads of each rank."""
    return replace(program.for_threads, beside=second.for_threads)


drawn = lru_cache(DrawnPrograms.programs)


@lru_cache
def in_ci(world_size: int) -> list[Program]:
    found = sorted(drawn(DrawnPrograms(IN_CI[world_size], world_size)), key=module_calls)
    used = Counter(name for program in found for name in features(program))
    for program in reversed([program for program in found if module_calls(program) > LONG]):
        if all(used[name] > FLOOR for name in features(program)):
            found.remove(program)
            used.subtract(features(program))
    return found


def run_alone(program: Program, timeout: float = 20.0) -> str:
    """Run one program and return its failure, or an empty text."""
    try:
        found = on_ranks([program], timeout)
    except RanksError as error:
        return str(error)
    return next(iter(found.values()), "")


def on_ranks(some: Sequence[Program], timeout: float) -> dict[int, str]:
    """Run programs in one call per transport and return the failures by position."""
    found: dict[int, str] = {}
    for number, transport in enumerate((IN_COMMON, SOCKETS)):
        positions = [i for i, program in enumerate(some) if len(repr(program)) % 2 == number]
        if positions:
            chosen = [some[i] for i in positions]
            results = run_ranks(differences, some[0].world_size, chosen, timeout=timeout, environment=transport)
            found |= {positions[i]: text for result in results for i, text in result.items()}
    if found:
        kill_ranks()  # they may have diverged, so that what they run next would fail too
    return found


def failures(all_programs: Sequence[Program]) -> dict[Program, str]:
    found: dict[Program, str] = {}
    for start in range(0, len(all_programs), BATCH):
        batch = all_programs[start : start + BATCH]
        suspects = run_together(batch)
        texts = {program: run_alone(program) for program in suspects}
        if suspects and not any(texts.values()):
            raise AssertionError(f"these programs fail together, but none of them fails alone: {suspects}")
        found |= {program: text for program, text in texts.items() if text}
    return found


def run_together(batch: Sequence[Program]) -> dict[Program, str]:
    """Run programs in one call. If it dies or hangs, run each half to find the cause."""
    try:
        found = on_ranks(batch, timeout=20.0 + 0.5 * len(batch))
    except RanksError as error:
        if len(batch) == 1:
            return {batch[0]: str(error)}
        middle = len(batch) // 2
        return run_together(batch[:middle]) | run_together(batch[middle:])
    return {batch[i]: text for i, text in found.items()}


def find_smallest(draw: DrawnPrograms, failed: dict[Program, str]) -> tuple[Program, str]:
    """Shrink a failing program for a limited time, and return the smallest failing program and its failure."""
    known = dict.fromkeys(draw.programs(), "") | failed
    by_drawn = draw.map_drawn()
    best, deadline = min(failed, key=lambda program: len(repr(program))), time.monotonic() + SHRINKING

    def check(program: Program) -> None:
        nonlocal best
        second = best.beside
        program = by_drawn.get(program, program if second is None else beside(program, second))
        if program not in known and time.monotonic() < deadline:
            known[program] = run_alone(program)
        if known.get(program):
            best = min(best, program, key=lambda program: len(repr(program)))
            raise AssertionError

    with pytest.raises(AssertionError):
        draw.each(check, Phase.shrink)
    return best, known[best]


def requested_draws(world_size: int) -> Iterator[DrawnPrograms]:
    """Return the rounds that the environment variables request."""
    requested = int(os.environ.get("FUZZ_PROGRAMS", "0")) * IN_CI[world_size] // sum(IN_CI.values())
    if not requested:
        yield DrawnPrograms(IN_CI[world_size], world_size)
        return
    first = int(os.environ.get("FUZZ_SEED", random.randrange(10**6)))
    for i, start in enumerate(range(0, requested, DRAW_SIZE)):
        yield DrawnPrograms(min(DRAW_SIZE, requested - start), world_size, first + i)


@pytest.mark.behaviour("A-04", "A-05", "A-07", "A-10", "C-01", "C-03", "C-04", "C-05", "C-06", "C-07", "C-08", "C-10")
@pytest.mark.behaviour("C-13", "D-01", "D-03", "A-06", "C-16", "J-02")
@pytest.mark.parametrize("world_size", IN_CI)
def test_programs_train_like_the_unsharded_model(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    def print_line(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"{line}\n")

    begin, number, used, failed = time.monotonic(), 0, Counter[str](), list[tuple[DrawnPrograms, dict[Program, str]]]()
    for draw in requested_draws(world_size):
        found = in_ci(world_size) if draw.seed is None else drawn(draw)
        assert len(drawn(draw)) == draw.size
        if bad := failures(found):
            failed.append((draw, bad))
        if draw.seed is not None:
            number += len(found)
            used.update(name for program in found for name in features(program))
            print_line(
                f"\nseed {draw.seed}: {number} programs on {world_size} ranks, {sum(len(b) for _, b in failed)} "
                f"failed, {time.monotonic() - begin:.0f} s"
            )
    for name, count in used.most_common():
        print_line(f"{count:7} {name}")
    if failed:
        program, text = find_smallest(*failed[0])
        number_failed = sum(len(bad) for _, bad in failed)
        raise AssertionError(f"{number_failed} programs failed. The smallest failing program:\n\n{program}\n\n{text}")


def test_fixed_programs_train_like_the_unsharded_model() -> None:
    assert failures(FIXED) == {}


def test_the_programs_of_ci_make_use_of_every_feature() -> None:
    used = Counter(name for program in in_ci(2) for name in features(program))
    assert {name: used[name] for name in FEATURES if used[name] < FLOOR} == {}


def test_programs_in_threads_leave_out_what_threads_share() -> None:
    fails = Step(fails="forward", tangents=True)
    both = beside(Program(tree=Leaf(), width=2, inside="autocast", steps=(fails,) * 3), Program(tree=Leaf(), width=3))
    for program in both.threads:
        assert program.inside == "nothing"
        assert not any(step.tangents or step.fails != "never" for step in program.steps)


def test_ranks_that_failed_run_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(sys.modules[__name__], "run_ranks", lambda *_, **__: [{}, {0: "they diverged"}])
    monkeypatch.setattr(sys.modules[__name__], "kill_ranks", lambda: killed.append(True))
    assert run_alone(Program(tree=Leaf(), width=2)) == "they diverged"
    assert killed == [True]


def _reentrant(times: int, *before: Leaf, reshard: bool | None = None) -> Program:
    segment = Block(kind="repeat", times=times, children=(Block(kind="reentrant checkpoint", children=(Leaf(),)),))
    if not before:
        return Program(tree=replace(segment, state=ShardCall(reshard=reshard)), width=2)
    return Program(tree=Block(kind="chain", children=(*before, segment), state=ShardCall(reshard=reshard)), width=2)


_RECURSIVE = Block(kind="recursive", children=(Leaf(kind="conv"),))

FOUND = {
    "segments that share a parameter, each with a backward of its own": _reentrant(2),
    "the same, with others before": _reentrant(3, Leaf(), Leaf()),
    "the same, with more before than segments": _reentrant(3, Leaf(), Leaf(), Leaf()),
    "a frozen group that is kept, thawed while it is being gathered by hand": Program(
        tree=Block(
            kind="chain",
            children=(Block(kind="chain", children=(Leaf(frozen=(0,)),), state=ShardCall()), Leaf(), Leaf()),
            state=ShardCall(),
        ),
        width=2,
        steps=(Step(keep="always", by_hand="unshard before"),) * 3,
    ),
    "the same, freed after forward": _reentrant(3, Leaf(), Leaf(kind="scale"), reshard=True),
    "error feedback in a model that is called 64 times, whose gradients depend on the first rounding": Program(
        tree=Block(kind="recursive", children=(Block(kind="recursive", children=(_RECURSIVE,)),), state=ShardCall()),
        width=2,
        by_seed=True,
        feedback=True,
        hidden="list",
        steps=(Step(backwards=("all", "all"), finish="synchronize", in_flight=100),) * 3,
    ),
}
"""Programs that failed in the past."""


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once_pass(name: str) -> None:
    assert run_alone(FOUND[name]) == ""


def forget_to_divide(self: BucketReducer, *args: object) -> object:
    scatter, reduction = args
    assert isinstance(reduction, Reduction)
    return ORIGINALS["finish"](self, scatter, Reduction(reduction.op, reduction.pre_divide, 1.0))


def forget_kept_groups(self: Root, *args: object) -> object:
    ORIGINALS["end_backward"](self, *args)
    for state in self.states.values():
        state.kept = None
    return None


def forget_held_gradients(self: ParamGroup, *args: object) -> object:
    ORIGINALS["hold_gradients"](self, *args)
    for parameter in self.parameters:
        parameter.drop_gradient()
    return None


def forget_residuals(self: Encoder, *args: object) -> object:
    ORIGINALS["commit"](self, *args)
    self._residual = None
    return None


def leave_out_a_rank(self: Bucket, *args: object) -> object:
    gather = ORIGINALS["prepare_gather"](self, *args)
    if self.pgs.axes.shard.rank and gather.payloads:
        # Replace it: a change in place would change the shard, and the other ranks would not notice.
        gather.payloads[0] = torch.zeros_like(gather.payloads[0])
    return gather


def leave_out_a_cached_rank(self: CachedMessage, *args: object) -> object:
    sent = ORIGINALS["pack"](self, *args)
    return torch.zeros_like(sent) if self.communicator.rank else sent


def divide_replicated_gradients(self: ModelParallel, *args: object) -> object:
    gradient, _ = args
    assert isinstance(gradient, DTensor)
    local = ORIGINALS["local_gradient"](self, *args)
    return local / prod(self.mesh.size(a) for a in self.data_axes if gradient.placements[a].is_replicate())


def count_steps_of_all_threads(self: OptimizerSteps) -> None:
    vars(STEPS).setdefault("number", 0)
    self.__dict__ = STEPS.__dict__


STEPS = SimpleNamespace()

BREAKAGES: dict[str, tuple[type, Callable[..., object], str, Environment]] = {
    "finish": (BucketReducer, forget_to_divide, "backward all", SOCKETS),
    "end_backward": (Root, forget_kept_groups, "keep always", SOCKETS),
    "hold_gradients": (ParamGroup, forget_held_gradients, "hold all", SOCKETS),
    "commit": (Encoder, forget_residuals, "error feedback", SOCKETS),
    "prepare_gather": (Bucket, leave_out_a_rank, "Shard(d), d > 0", SOCKETS),
    "pack": (CachedMessage, leave_out_a_cached_rank, "backward all", SOCKETS),
    "local_gradient": (ModelParallel, divide_replicated_gradients, "dp_mesh_dims, gradients replicated", SOCKETS),
    "__init__": (OptimizerSteps, count_steps_of_all_threads, "two threads", IN_COMMON),
}
"""Maps each replaced method to its class, the replacement, a feature that exposes it, and the transport."""

ORIGINALS = {name: getattr(owner, name) for name, (owner, *_) in BREAKAGES.items()}


def differences_when_broken(name: str, some: Sequence[Program]) -> dict[int, str]:
    owner, broken, *_ = BREAKAGES[name]
    setattr(owner, name, broken)
    try:
        return differences(some)
    finally:
        setattr(owner, name, ORIGINALS[name])


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_library_is_noticed(name: str) -> None:
    _, _, feature, transport = BREAKAGES[name]
    fit = [program for program in in_ci(2) if feature in features(program)]
    some = (fit[start : start + 5] for start in range(0, len(fit), 5))
    try:
        assert any(any(run_ranks(differences_when_broken, 2, name, each, environment=transport)) for each in some)
    finally:
        kill_ranks()  # they may have diverged and must not be reused by another test
