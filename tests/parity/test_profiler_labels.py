"""Names of groups in torch's profiler and in ``TORCH_LOGS``."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import composable_fsdp as ours
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import single_rank
from tests.helpers.transports import TRANSPORTS, Environment

pytestmark = pytest.mark.behaviour("I-03")


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


def chain(shard: Any) -> Any:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3)) for _ in range(2)])
    for block in model:
        shard(block)
    return shard(model)


def labels_of(shard: Any) -> set[str]:
    model = chain(shard)
    model(torch.ones(2, 3)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        model(torch.ones(2, 3)).sum().backward()
    return {event.key for event in recorded.key_averages() if event.key.startswith("FSDP::")}


def first_words(labels: set[str]) -> set[str]:
    return {label.partition(" ")[0].removeprefix("FSDP::") for label in labels}


@on_ranks(2)
def test_labels_are_those_of_the_page_and_annotations_as_of_record_function() -> None:
    model = chain(ours.fully_shard)
    model(torch.ones(2, 3)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        model(torch.ones(2, 3)).sum().backward()
    labels = [event for event in recorded.events() if event.name.startswith("FSDP::")]
    assert all(event.is_user_annotation for event in labels)
    page = (Path(ours.__file__).parents[1] / "docs" / "how-to" / "profiler.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert first_words({event.name for event in labels}) == set(re.findall("`(.*?)`", "".join(rows)))


@on_ranks(2)
def test_labels_are_torchs_words_with_the_names_of_modules() -> None:
    mine, torchs = labels_of(ours.fully_shard), labels_of(torch_fsdp.fully_shard)
    assert first_words(mine) <= first_words(torchs) | {"post_backward_rs_wait"}  # which torch 2.11 lacks
    for word in ("pre_forward", "all_gather", "all_gather_copy_out", "post_forward", "pre_backward"):
        assert f"FSDP::{word} (1)" in torchs
        assert any(label.startswith(f"FSDP::{word} (") for label in mine)
    for word in ("pre_forward", "post_forward", "pre_backward"):
        assert {f"FSDP::{word} (0)", f"FSDP::{word} (1)"} <= mine & torchs
    assert "FSDP::all_gather (root)" not in mine  # the root has no parameters of its own, so it gathers nothing
    assert first_words(mine) >= {"post_backward_reduce", "root_post_backward_callback"}


def test_the_log_of_torchs_fsdp_shows_ours(caplog: pytest.LogCaptureFixture) -> None:
    model = chain(ours.fully_shard)
    with caplog.at_level(logging.DEBUG, logger="torch.distributed.fsdp"):
        model(torch.ones(2, 3)).sum().backward()
    assert "FSDP::pre_forward (0)" in caplog.messages
    assert "FSDP::pre_backward (1)" in caplog.messages


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.linear(x).chunk(2, dim=1))


def test_a_profile_that_begins_with_backward_has_its_labels_once_for_each_module() -> None:
    model = ours.fully_shard(Halves())
    first, second = model(torch.ones(2, 4))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        (first.sum() + second.exp().sum()).backward()
    labels = [event.name for event in recorded.events() if event.name.startswith("FSDP::")]
    assert labels.count("FSDP::pre_backward (root)") == 1
    assert labels.count("FSDP::root_post_backward_callback (root)") == 1
    assert labels.count("FSDP::post_backward_reduce (root)") == 1


PROGRAM = """
import torch, torch.distributed as dist
from composable_fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(fully_shard(torch.nn.Linear(2, 2)))
fully_shard(model)(torch.ones(1, 2)).sum().backward()
"""


def test_torch_logs_enables_the_fsdp_log() -> None:
    environment = os.environ | {"TORCH_LOGS": "+fsdp", "PYTHONPATH": str(Path(ours.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "FSDP::all_gather (0)" in done.stderr


def test_logging_enabled_between_steps_begins_with_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = chain(ours.fully_shard)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    assert not caplog.text
    with caplog.at_level(logging.DEBUG, "torch.distributed.fsdp.fully_shard"):
        model(x).sum().backward()
        forward, *_ = caplog.messages
        assert forward == "FSDP::pre_forward (root)"
        caplog.clear()
        model[0].unshard()
        assert caplog.messages[0] == "FSDP::all_gather (0)"
    caplog.clear()
    model(x).sum().backward()
    assert not caplog.text


@on_ranks(2, transports=TRANSPORTS)
def test_the_communication_debug_mode_counts_collectives_for_modules() -> None:
    model = chain(ours.fully_shard)
    model.set_schedule(max_fused_bytes=0)
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    with CommDebugMode() as mode:
        model(x).sum().backward()
    counted = {
        name: {direction: {op.__name__: n for op, n in of_pass.items()} for direction, of_pass in of_module.items()}
        for name, of_module in mode.comm_module_counts.items()
    }
    expected = {"forward": {"_allgather_base_": 2}, "backward": {"_allgather_base_": 2, "_reduce_scatter_base_": 2}}
    assert counted["FSDPSequential"] == expected
    assert counted["FSDPSequential.0"] == {
        "forward": {"_allgather_base_": 2},  # its own all-gather and the prefetch of the next one
        "backward": {"_reduce_scatter_base_": 1},
    }
    assert counted["FSDPSequential.1"] == {
        "forward": {},
        "backward": {"_allgather_base_": 2, "_reduce_scatter_base_": 1},
    }


def collectives_of(shard: Any) -> list[tuple[str, str, int]]:
    """Return torch's name, the group of the enclosing label and the bytes of each collective of one step."""
    model = chain(shard)
    if isinstance(model, ours.FSDPModule):
        model.set_schedule(max_fused_bytes=0)
    model(torch.ones(2, 3)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as recorded:
        model(torch.ones(2, 3)).sum().backward()
    found = []
    for event in recorded.events():
        if event.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            around = event.cpu_parent
            while around is not None and not around.name.startswith("FSDP::"):
                around = around.cpu_parent
            group = around.name.partition("(")[2].removesuffix(")")
            nbytes = sum(4 * shape[0] for shape in event.input_shapes[1::2] if shape)
            found.append((event.name, group, nbytes))
            if shard is ours.fully_shard:
                assert (event.kwinputs["group"], event.kwinputs["bytes"]) == (group, nbytes)
    return sorted(found)


def check_names_and_bytes(gathers: bool) -> None:
    mine = collectives_of(ours.fully_shard)
    reductions = [each for each in mine if each[0] == "c10d::_reduce_scatter_base_"]
    assert [group for _, group, _ in reductions] == ["0", "1"]
    if dist.get_world_size() == 1:  # torch copies instead of communicating
        assert all(nbytes == 4 * (9 + 3) for *_, nbytes in reductions)
        return
    torchs = collectives_of(torch_fsdp.fully_shard)
    assert [(name, group) for name, group, _ in torchs if "reduce" in name] == [each[:2] for each in reductions]
    assert all(nbytes >= 4 * (9 + 3) for *_, nbytes in reductions)
    if gathers:  # with shared memory there may be no collectives
        assert [each[:2] for each in mine] == [each[:2] for each in torchs]


@pytest.mark.parametrize(("transport", "environment"), TRANSPORTS.items(), ids=TRANSPORTS)
def test_profiles_name_collectives_as_torch_does_with_group_and_bytes(transport: str, environment: Environment) -> None:
    run_ranks(check_names_and_bytes, 2, transport != "in common", environment=environment)
    if transport == "in common":
        run_ranks(check_names_and_bytes, 1, False)
