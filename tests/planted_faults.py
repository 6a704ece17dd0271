"""Remove each wait, event, synchronization and owning reference of the library in turn, and see what reports it.

    python -m tests.planted_faults                    # all, as a table; about 10 minutes
    python -m tests.planted_faults memory.py          # those whose path or function has this text

A *site* is a call of ``wait_stream``, ``wait_event``, ``record_event``, ``record``, ``wait`` or ``synchronize`` in the
source, or a statement of :data:`OWNED` that keeps memory alive. A fault leaves out one site: the function that has it
is compiled again without it. The trainings of ``tests.helpers.stream_training`` that reach the site run with the fault,
one after the other in a process of their own, until the race detector has reported something, and late execution too.
Operations take no time there, so that a fault that none of them notices also runs a test in virtual time.

Collectives keep no tensors here, unlike those of NCCL, which keep them until they have been waited for. So the owning
references of the library are needed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast
from unittest import mock

import composable_fsdp
from tests.helpers.stream_training import TRAININGS
from tests.simulation import simulated_accelerator, stream_group

PACKAGE = Path(composable_fsdp.__file__).parent
METHODS = ("wait_stream", "wait_event", "record_event", "record", "wait", "synchronize")
ORDERS = 5
"""The number of other orders."""
CHOSEN = [name for name in TRAININGS if "hybrid" not in name or name.startswith(("unfused", "int8", "sums held"))]
"""The trainings that run with faults."""
MORE = 3
"""Late execution gets this many trainings of a fault, the first one that has a race and those after it."""

NO_STREAMS = {
    "cli/": "commands, which run no training",
    "checkpoint/_coordination.py": "messages between the hosts of ranks, and threads",
    "checkpoint/_dcp/save.py": "futures of torch's writers of files",
    "checkpoint/_convert.py": "a tool that needs no device",
    "plugins/gloo/": "blocks the host",
    "plugins/shared_memory/": "blocks the host",
    "plugins/visible_collectives.py": "a process group of one rank, for torch's CommDebugMode",
}
"""Files whose calls order no work of streams."""
NO_ORDER = {
    ("_core/memory.py", "_capabilities", "record_event"): "asks whether the device has streams",
    ("_core/comm.py", "_launch_coalesced", "wait"): "torch before 2.12, which the tests do not run on",
    ("_core/memory.py", "InFlight.start", "wait"): "only where waits block the host: streams order it by `enqueue`",
    ("checkpoint/_dcp/load.py", "read", "wait"): "a future of torch's reader of files",
    ("_core/gather.py", "AllGather._await_ranks", "wait"): "memory that ranks of a host share",
}
"""Sites that order no work of streams, by path, function and method."""

_MOST_TRAININGS = 16
"""The number of trainings for a fault, of those that reach it."""
_MOST_SECONDS = 600.0
"""The time limit of a fault."""

OWNED = (
    (
        "_core/memory.py",
        "InFlight.enqueue",
        "self._event, self._current_stream = ",
        "self._owned = None if self._done else self._owned\nself._event, self._current_stream = ",
    ),
    ("_core/reduce.py", "BucketReducer.add_partial_sum", "buffers.added = kept", "pass"),
    (
        "_core/reduce.py",
        "Exchange.launch",
        "return self._communicator.launch(Collective.ALL_TO_ALL, [Transfer(self._received, self._sent)], label)",
        "sent, self._sent = self._sent, None\n"
        "return self._communicator.launch(Collective.ALL_TO_ALL, [Transfer(self._received, sent)], label)",
    ),
)
"""Statements that keep memory alive until work is done: path, function, the text in the source, and that without it."""


EXPLAINED = {
    **{
        f"ParamGroup.{function}: self.partial_reduction.wait()": "On streams, the reduce stream orders both. Where "
        f"waits block the host, {test} of tests/ranks/test_accumulation.py fails."
        for function, test in {
            "start_reducing": "test_microbatches_summed_in_any_way_train_like_the_large_batch"
        }.items()
    },
    **dict.fromkeys(
        (
            "InFlight.wait: self._launched_from.wait_event(current.record_event())",
            "InFlight.wait: current.record_event()",
        ),
        "Only where a module on another stream is the first to wait. "
        "test_memory_is_not_used_again_before_another_stream_that_has_waited_for_it_is_done of "
        "tests/unit/test_comm_streams.py fails.",
    ),
    **{
        site: f"On streams, a collective runs on the stream that launches it. Where it is asynchronous, as over gloo, "
        f"{test} of tests/ranks fails."
        for site, test in {
            "WorkList.wait: work.wait()": "test_parameter_meshes.py",
            "InFlight._complete: self._work.wait()": "test_mixed_precision.py",
            "gather_rows: axis.launch(Collective.ALL_GATHER, [Transfer(received, gathered)], label).wait()": (
                "test_starting_values.py"
            ),
        }.items()
    },
    "CommStream.join: self._module.current_stream().wait_stream(stream)": "Only after a failed "
    "launch, or aborted collectives. test_memory_of_a_failed_launch_is_not_used_again_before_its_copies_are_done of "
    "tests/unit/test_comm_streams.py fails.",
}
"""The sites that nothing reports on streams, by function and call, with what reports them elsewhere."""

_Key = tuple[str, str, int]
"""The path, function and number of a site."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call or a statement that a fault leaves out. ``path``: the file, in the package. ``function``: the qualified
    name of the outermost function. ``text``: the call, or what takes the place of a statement. ``number``: the position
    of the call among the calls in the function; the position in :data:`OWNED` if negative."""

    path: str
    function: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.path} {self.function}: {self.text}"

    @property
    def key(self) -> _Key:
        return self.path, self.function, self.number


class Outcome(NamedTuple):
    """The names of the trainings that report a fault, by kind of report; empty texts for none."""

    race: str = ""
    bits: str = ""
    error: str = ""


@cache
def _source(path: str) -> str:
    return (PACKAGE / path).read_text()


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions at the top and in classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls of a function that may be left out: the value of a ``wait`` must not be used."""
    statements = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        if node.func.attr != "wait" or id(node) in statements
    ]


@cache
def sites() -> Sequence[Site]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = str(file.relative_to(PACKAGE))
        if any(path.startswith(each) for each in NO_STREAMS):
            continue
        for name, function in _functions(ast.parse(_source(path))):
            for number, call in enumerate(_calls(function)):
                if (path, name, cast(ast.Attribute, call.func).attr) not in NO_ORDER:
                    found.append(Site(path, name, ast.unparse(call), number))
    return found + [Site(path, name, old, -1 - i) for i, (path, name, old, _) in enumerate(OWNED)]


class _Replace(ast.NodeTransformer):
    """Has calls of a function note that they are reached, and leaves out one of them, or none."""

    def __init__(self, sites: Mapping[int, _Key], left_out: int | None) -> None:
        self._sites = sites
        self._left_out = left_out

    def visit_Call(self, node: ast.Call) -> ast.AST:
        site = self._sites.get(id(node))
        node = cast(ast.Call, self.generic_visit(node))
        if site is None or self._left_out not in (None, site[2]):
            return node
        value = node if self._left_out is None else _instead(cast(ast.Attribute, node.func))
        reached = ast.Call(ast.Name("__reached__", ast.Load()), [ast.Constant(cast(Any, site))], [])
        both = ast.Tuple([reached, value], ast.Load())
        return ast.copy_location(ast.Subscript(both, ast.Constant(1), ast.Load()), node)


def _instead(method: ast.Attribute) -> ast.expr:
    """Return what takes the place of a call of ``method``: an event that was not recorded, a wait, or no call."""
    if method.attr == "record_event":
        return ast.parse("__import__('torch').cpu.Event()", mode="eval").body
    if method.attr == "synchronize" and ast.unparse(method.value).endswith("_pending"):
        return ast.Call(ast.Attribute(method.value, "wait", ast.Load()), [], [])
    return method.value


def _compiled(path: str, name: str, number: int | None) -> CodeType:
    """Return the code of a function with calls replaced, all or one, or without a statement of :data:`OWNED`."""
    tree = ast.parse(_source(path))
    function = dict(_functions(tree))[name]
    if number is not None and number < 0:
        _, _, old, new = OWNED[-1 - number]
        source = ast.unparse(function)
        (line,) = (line for line in source.splitlines() if old in line)
        indent = line[: len(line) - len(line.lstrip())]
        changed = ast.parse(source.replace(line, line.replace(old, new.replace("\n", f"\n{indent}"))))
        function.body = cast(ast.FunctionDef, changed.body[0]).body
    else:
        keys = {id(call): (path, name, i) for i, call in enumerate(_calls(function))}
        _Replace(keys, number).visit(function)
    code = compile(ast.fix_missing_locations(tree), str(PACKAGE / path), "exec")
    for part in name.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return code


def _live(path: str, name: str) -> FunctionType:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: Any = importlib.import_module(f"{PACKAGE.name}.{module}")
    for part in name.split("."):
        found = vars(found)[part]
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return cast(FunctionType, unwrap(found))


@contextmanager
def _changed(functions: Iterable[tuple[str, str]], left_out: int | None = None) -> Iterator[set[_Key]]:
    """Have functions note the sites that they reach in a set, and leave out one site of them, or none."""
    reached = set[_Key]()
    before = {_live(path, name): _compiled(path, name, left_out) for path, name in functions}
    try:
        for function in before:
            function.__code__, before[function] = before[function], function.__code__
        with mock.patch.object(builtins, "__reached__", reached.add, create=True):
            yield reached
    finally:
        for function, code in before.items():
            function.__code__ = code


@contextmanager
def left_out(function: str, text: str) -> Iterator[None]:
    """Leave out the first site of ``function`` whose call, or the statement in :data:`OWNED`, is ``text``."""
    site = next(site for site in sites() if (site.function, site.text) == (function, text))
    with _changed([(site.path, site.function)], site.number):
        yield


class _KeepsNothing(stream_group.StreamWork):
    """A collective that does not keep its tensors."""

    def __init__(self, accelerator: Any, event: Any, tensors: Any) -> None:
        super().__init__(accelerator, event, None)


def _run(training: str, *, orders: int) -> tuple[bool, bool, str]:
    """Return whether a training has races, whether it has other bits in other orders, and its error."""
    error = ""
    with (
        mock.patch.object(stream_group, "StreamWork", _KeepsNothing),
        simulated_accelerator(records=orders > 0) as device,
    ):
        try:
            TRAININGS[training]()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return bool(device.races), any(device.run_late(seed) for seed in range(orders)), error


def try_fault(site: Site, trainings: Sequence[str], orders: int = ORDERS) -> Outcome:
    """Run ``trainings`` without ``site`` until one has a race, and that one and some more until one has other bits."""
    race = bits = error = ""
    with _changed([(site.path, site.function)], site.number):
        for training in trainings:
            has_race, _, text = _run(training, orders=0)
            race, error = race or training * has_race, error or (f"{training}: {text}" if text else "")
            if race:
                break
        begin = trainings.index(race) if race else 0
        for training in trainings[begin : begin + MORE]:
            if _run(training, orders=orders)[1]:
                bits = training
                break
    return Outcome(race, bits, error.partition("\n")[0])


def reached_by(training: str) -> list[_Key]:
    """Return the sites that ``training`` reaches. It must have no race."""
    calls = [site for site in sites() if site.number >= 0]
    with _changed({(site.path, site.function) for site in calls}) as reached:
        outcome = _run(training, orders=0)
    assert outcome == (False, False, ""), f"{training} has problems without faults: {outcome}"
    return sorted(reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only sites that have one of these texts in path, function or call")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")

    def alone(function: Callable[..., Any], *args: object) -> Any:
        """Return the result of ``function`` in a process of its own."""
        with context.Pool(1) as pool:
            return pool.apply_async(function, args).get(_MOST_SECONDS)

    reached = {training: set(alone(reached_by, training)) for training in CHOSEN}
    chosen = [site for site in sites() if not options.parts or any(part in str(site) for part in options.parts)]
    counts = Counter[str]()
    sys.stdout.write("| in | left out | race in | other bits in | otherwise |\n|---|---|---|---|---|\n")
    for site in chosen:
        fit = [name for name in reversed(CHOSEN) if site.number < 0 or site.key in reached[name]][:_MOST_TRAININGS]
        outcome = alone(try_fault, site, fit)
        counts.update(kind for kind in ("race", "bits", "error") if getattr(outcome, kind))
        counts["noticed"] += any(outcome)
        counts["not reached"] += not fit
        note = outcome.error.partition(": ")[2] or EXPLAINED.get(str(site).partition(" ")[2], "")
        sys.stdout.write(f"| `{site.function}` | `{site.text}` | {outcome.race} | {outcome.bits} | {note} |\n")
    sys.stdout.write(f"{len(chosen)} sites: {dict(counts)}\n")


if __name__ == "__main__":
    main()
