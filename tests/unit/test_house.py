"""The lines of code of the package, and the length of the way from a module's hook to a collective. Bounds may only be
lowered. A change that needs more lines in a folder removes as many elsewhere, or gives its reason in the commit that
raises the bound."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.helpers.fresh_process import run_program
from tests.helpers.house import (
    class_fields,
    imported_by,
    imported_code,
    imported_names,
    lines_over_sets,
    loops_over_sets,
    sizes_by_folder,
)

HOOKS = "_core/hooks.py"

MOST_CODE = {
    ".": 654,
    "_api": 966,
    "_consistency": 852,
    "_core": 5186,
    "checkpoint": 2818,
    "cli": 335,
    "codecs": 263,
    "diagnostics": 449,
    "init": 263,
    "interop": 54,
    "optim": 1089,
    "plan": 670,
    "plugins": 4819,
    "wrap": 179,
}
"""The lines of code of each folder: with a statement that is no import, docstring or ``__all__``."""

MOST_CODE_OF_ALL = 18597

MOST_FILES_OF_HOOKS, MOST_CODE_OF_HOOKS = 20, 5400
"""The files and lines of code that importing the hooks reads."""

MOST_FIELDS = {"ParamGroup": 29, "ShardedParameter": 20}
MOST_FIELDS_OF_OTHERS = 19

MOST_IMPORTED_NAMES = 49
"""The names that one file imports from the package."""

MOST_FRAMES_TO_C10D = {"forward": 9, "backward": 10}
"""The frames of the package between a module's or autograd's call of a hook and c10d's collective, both included, with
no observer and no decorator attached."""


def test_no_folder_of_the_package_has_grown() -> None:
    sizes = sizes_by_folder()
    assert sizes.keys() == MOST_CODE.keys(), "a new folder needs a bound"
    grown = {folder: size.code for folder, size in sizes.items() if size.code > MOST_CODE[folder]}
    assert not grown, f"{grown}, at most {[MOST_CODE[folder] for folder in grown]}"
    assert sum(size.code for size in sizes.values()) <= MOST_CODE_OF_ALL


def test_no_two_files_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_importing_the_hooks_reads_few_files() -> None:
    assert len(imported_by(HOOKS)) <= MOST_FILES_OF_HOOKS
    assert imported_code(HOOKS) <= MOST_CODE_OF_HOOKS


def test_classes_have_few_fields_and_files_import_few_names() -> None:
    fields = class_fields()
    assert MOST_FIELDS.keys() <= fields.keys(), "a class is gone: remove its bound"
    wide = {n: c for n, c in fields.items() if c > MOST_FIELDS.get(n, MOST_FIELDS_OF_OTHERS)}
    assert not wide
    assert max(imported_names().values()) <= MOST_IMPORTED_NAMES


def test_no_loop_runs_over_a_set() -> None:
    """Its order differs between ranks: a loop that launches collectives would give one rank's values to others."""
    assert not loops_over_sets()


MEASURE_FRAMES = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
import composable_fsdp
from composable_fsdp import plugins

for attached in (plugins.AROUND, plugins.OBSERVERS, plugins.HOOK_WRAPPERS):
    attached.clear()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in (*model, model):
    composable_fsdp.fully_shard(layer, mesh=mesh)
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
root, which, found = os.path.dirname(composable_fsdp.__file__) + os.sep, "forward", {}

def note(frame, event, _):
    name = frame.f_code.co_name
    if event == "call" and name in COLLECTIVES:
        depth = 0
        while frame is not None and frame.f_code.co_name != "_call_impl":
            depth += frame.f_code.co_filename.startswith(root)
            frame = frame.f_back
        found.setdefault(which, []).append(depth)

for step in range(3):
    output = model(torch.randn(4, 8))
    output.sum().backward()
sys.setprofile(note)
output = model(torch.randn(4, 8))
which = "backward"
output.sum().backward()
sys.setprofile(None)
print(json.dumps(found))
"""


def test_few_frames_lie_between_a_hook_and_the_collective() -> None:
    result = run_program(MEASURE_FRAMES)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() == MOST_FRAMES_TO_C10D.keys()
    for which, depths in found.items():
        assert max(depths) <= MOST_FRAMES_TO_C10D[which], (which, depths)


def test_loops_over_sets_are_found() -> None:
    source = """
def f(roots, states):
    known = {state.root for state in states}
    for root in known:
        root.drain()
    for root in known - set(roots):
        root.drain()
    first = [root.drain() for root in {*roots}]
    every = tuple(known)
    return any(root.launches for root in known), sorted(known), [root for root in dict.fromkeys(roots)]
"""
    assert sorted(lines_over_sets(source)) == [4, 6, 8, 9]
