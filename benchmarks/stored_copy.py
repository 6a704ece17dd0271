"""Measures the host time of a group beside that of a stored copy of this library, in one process.

    git worktree add --detach /tmp/stored 5ed957a7
    OMP_NUM_THREADS=1 python benchmarks/stored_copy.py /tmp/stored

The ratio to FSDP2 differs by 15 % from day to day for the same code. Here both copies run their steps in turn, as
``host_overhead.py`` runs the libraries. Both have the name ``composable_fsdp``: each has the entries of ``sys.modules``
while it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from host_overhead import WORLD, Layer, step
from libraries import fake_ranks, shard
from report import interleaved, parser, publish, ratios, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import composable_fsdp

_NAME = composable_fsdp.__name__


class Copy:
    """The modules of one copy of the library: that of ``folder``, or the one that is imported already."""

    def __init__(self, folder: Path | None = None) -> None:
        self._modules: dict[str, ModuleType] = {}
        if folder is None:
            self._modules.update(_own_modules())
            return
        sys.path.insert(0, str(folder))
        with self.active():
            found = __import__(_NAME)
        sys.path.remove(str(folder))
        if not Path(str(found.__file__)).is_relative_to(folder.resolve()):
            raise SystemExit(f"there is no {_NAME} in {folder}")

    @contextmanager
    def active(self) -> Iterator[ModuleType | None]:
        """Give this copy the name of the library."""
        others = _own_modules()
        _replace(self._modules)
        try:
            yield sys.modules.get(_NAME)
        finally:
            self._modules = _own_modules()
            _replace(others)


def _own_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == _NAME}


def _replace(modules: dict[str, ModuleType]) -> None:
    for name in _own_modules():
        del sys.modules[name]
    sys.modules.update(modules)


def variant(copy: Copy, parameters: int, groups: int, mesh: DeviceMesh) -> Callable[[], float]:
    """Return a step of a model that ``copy`` shards. It returns the CPU microseconds of each of its groups."""
    with copy.active() as library:
        assert library is not None
        model = nn.Sequential(*(Layer(parameters) for _ in range(groups)))
        shard(library, model, list(model), mesh, bf16=False)
    run = step(model, torch.randn(4, 16, requires_grad=True))

    def active_run() -> float:
        with copy.active():
            return run()

    return active_run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, help="a checkout of another version")
    options.add_argument("--rounds", type=int, default=60)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    here, stored = Copy(), Copy(arguments.folder.resolve())
    rounds, sizes = (5, (4,)) if arguments.quick else (arguments.rounds, (1, 4, 12, 48))
    rows = []
    with fake_ranks(WORLD) as mesh:
        for size in sizes:
            # Two models of each copy: their places in memory differ, and models built later are some percent faster.
            copies = {"here": here, "stored": stored, "stored again": stored, "here again": here}
            samples = interleaved({name: variant(c, size, 12, mesh) for name, c in copies.items()}, rounds, warm_up=8)
            ours, theirs = (samples[name] + samples[f"{name} again"] for name in ("here", "stored"))
            both = {
                "here/stored": ratios(ours, theirs),
                "stored/stored": ratios(samples["stored again"], samples["stored"]),
            }
            rows.append({"parameters": size, "here us": spread(ours), "stored us": spread(theirs), **both})
    publish("host time beside a stored copy", {"stored": arguments.folder.name}, list(rows[0]), rows, arguments.out)


if __name__ == "__main__":
    main()
