"""The tables of ``docs/nccl.md``: ``python -m tests.helpers.nccl_page`` writes them. One has the rules of the stand-in,
with the programs that break them. The other has the launches of a step and the frames between a hook and c10d, of this
library and of torch's FSDP2, as the stand-in counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_fsdp import fully_shard
from tests.helpers.stream_training import Block, alone
from tests.planted_nccl import ALONE, ON_RANKS, Program
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, Launch, stands_in
from tests.simulation.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "nccl.md"
BLOCKS = 6
STEPS = 3
MESHES = ("sharded", "hybrid")
_BEGIN, _END = "<!-- {} -->\n", "<!-- end of {} -->"


def _unfused(model: nn.Module, **options: Any) -> Any:
    sharded: Any = fully_shard(model, **options)
    sharded.set_schedule(max_fused_bytes=0)
    return sharded


LIBRARIES: dict[Callable[..., Any], str] = {
    fully_shard: "ours",
    _unfused: "ours, without fusion",
    torch_fully_shard: "FSDP2",
}


def launches_of_a_step(library: Callable[..., Any], mesh: str, variant: str) -> Sequence[Launch]:
    """Train blocks of four parameters, and return the launches of the last step."""
    with stands_in(variant, alone=True) as contract, alone() as both, simulated_accelerator():
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        for block in model:
            library(block, mesh=both if mesh == "hybrid" else both["shard"])
        library(model, mesh=both if mesh == "hybrid" else both["shard"])
        for _ in range(STEPS):
            contract.launches.clear()
            model(torch.randn(8, 64)).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
    return contract.launches


def _name_of(program: Program) -> str:
    """Return the name of a program, with the part of the library that it leaves out if it does so."""
    function = program.func if isinstance(program, partial) else program
    name = getattr(function, "__qualname__", "").partition(".")[0]
    if name != "train_without":
        return f"`{name}`"
    _, where, text = program.args  # type: ignore[attr-defined]
    return f"`{where}` without `{text.strip(' =')}`"


def rules_table() -> str:
    """Return a row for each rule, with the programs that break it."""
    lines = [
        "| rule | c10d and NCCL | source | fault that the tests plant | what only a GPU can show |",
        "|---|---|---|---|---|",
    ]
    for rule, row in RULES.items():
        file = "tests/ranks/test_nccl_ranks.py" if rule in ON_RANKS else "tests/unit/test_nccl.py"
        names = dict.fromkeys(map(_name_of, {**ALONE, **ON_RANKS}[rule]))
        lines.append(f"| {rule} | {row.text} | {row.source} | {', '.join(names)} in `{file}` | {row.only_gpu} |")
    return "\n".join(lines) + "\n"


def _counts() -> str:
    lines = [
        "| mesh | backend | library | launches: all-gather | reduce-scatter | all-reduce | frames from hook to c10d |",
        "|---|---|---|---|---|---|---|",
    ]
    for mesh in MESHES:
        for variant in VARIANTS:
            for library, name in LIBRARIES.items():
                launches = launches_of_a_step(library, mesh, variant)
                frames = sorted(launch.frames for launch in launches)
                lines.append(f"{counts_of(launches, mesh, variant, name)} {frames[0]} to {frames[-1]} |")
    return "\n".join(lines) + "\n"


def counts_of(launches: Sequence[Launch], mesh: str, variant: str, name: str) -> str:
    """Return the columns of a row without the frames, which depend on the version of Python."""
    count = Counter(launch.operation for launch in launches)
    numbers = " | ".join(str(count[kind]) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    return f"| {mesh} | {variant} | {name} | {numbers} |"


def part_of(page: str, name: str) -> str:
    """Return the table ``name`` of the page."""
    return page.partition(_BEGIN.format(name))[2].partition(_END.format(name))[0]


def main() -> None:
    page = PAGE.read_text()
    for name, table in {"rules": rules_table(), "counts": _counts()}.items():
        begin, end = _BEGIN.format(name), _END.format(name)
        page = f"{page.partition(begin)[0]}{begin}{table}{end}{page.partition(end)[2]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
