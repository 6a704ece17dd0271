"""Changed weights to another process group, another process, and files of a sender that is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import fully_shard, stream_changed_params, stream_full_params
from composable_fsdp.errors import FlushError
from composable_fsdp.plugins.weight_stream import Flush, Position, SentParams, apply_changes
from tests.helpers.forked_python import forked_python
from tests.helpers.models import UnevenMLP, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.torchrun import torchrun


@pytest.mark.behaviour("C-14")
@on_ranks(3)
def test_a_receiver_in_another_process_group_has_the_weights() -> None:
    """Ranks 0 and 1 train. Rank 0 broadcasts flushes to rank 2, which loses one and then gets everything."""
    mesh, pair, rank = DeviceMesh("cpu", [0, 1]), dist.new_group([0, 2]), dist.get_rank()
    trainers = dist.new_group([0, 1])
    plain = {name: p.detach().half() for name, p in seeded(UnevenMLP)().named_parameters()}
    if rank == 2:
        state, position = {name: torch.zeros_like(value) for name, value in plain.items()}, None
        while True:
            size = torch.tensor(0)
            dist.broadcast(size, 0, pair)
            if size == 0:
                break
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, pair)
            answer = torch.tensor(0)
            try:
                position = apply_changes(state, Flush.from_bytes(data.numpy().data), position)
            except FlushError:
                answer += 1
            dist.broadcast(answer, 2, pair)
        assert position is not None
        assert position.is_complete
        for name, value in plain.items():
            full = torch.empty_like(value)
            dist.broadcast(full, 0, pair)
            assert torch.equal(state[name], full), name
        return
    model, sent = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=mesh), SentParams()
    for step in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                local: Any = parameter
                local.to_local().view(-1)[:2].add_(step)
        refused = torch.tensor(0)
        for number, flush in enumerate(stream_changed_params(model, sent, 100, torch.float16, rank0_only=True)):
            if rank == 0 and (step, number) != (2, 1):  # this one is lost
                data = torch.frombuffer(bytearray(flush.to_bytes()), dtype=torch.uint8)
                dist.broadcast(torch.tensor(data.numel()), 0, pair)
                dist.broadcast(data, 0, pair)
                answer = torch.tensor(0)
                dist.broadcast(answer, 2, pair)
                refused += answer
        dist.broadcast(refused, 0, trainers)
        assert bool(refused) == (step == 2)
        if refused:
            sent.forget()
    if rank == 0:
        dist.broadcast(torch.tensor(0), 0, pair)
    for bucket in stream_full_params(model, 1, torch.float16):
        for tensor in dict(bucket.items()).values():
            if rank == 0:
                dist.broadcast(tensor, 0, pair)


class Steps(nn.Module):
    """Parameters that are a function of the step, which one of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(()))
        self.values = nn.ParameterList(torch.zeros(40) for _ in range(4))

    @torch.no_grad()
    def go_to(self, step: int) -> None:
        self.step.fill_(step)
        for k, value in enumerate(self.values):
            value[step % 40] = step + k

    def expected(self, first: int, step: int) -> dict[str, torch.Tensor]:
        made = Steps()
        for each in range(first, step + 1):
            made.go_to(each)
        return dict(made.named_parameters())


def send_steps(folder: Path, first: int, die_at: int) -> int:
    """Save the flushes of three steps to files, and die at a line of the library. Return the number of lines."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if "weight_stream" not in frame.f_code.co_filename and "_files" not in frame.f_code.co_filename:
            return None
        lines += 1
        if lines == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    model, sent = Steps(), SentParams()
    sys.settrace(trace)
    for step in range(first, first + 3):
        model.go_to(step)
        for flush in stream_changed_params(model, sent, 200):
            flush.save(folder)
    sys.settrace(None)
    return lines


class Reader:
    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, ""
        self.state = {name: torch.zeros_like(value) for name, value in Steps().named_parameters()}
        self.position: Position | None = None

    def read(self) -> None:
        for name in sorted(os.listdir(self.folder)):
            if name > self.seen and not name.startswith("."):
                self.position = apply_changes(self.state, Flush.load(self.folder, name), self.position)
                self.seen = name


def test_files_of_a_sender_that_is_killed_at_thirty_points_are_whole_and_the_next_sender_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "counted").mkdir()
    lines, folder = send_steps(tmp_path / "counted", 0, 0), tmp_path / "flushes"
    folder.mkdir()
    reader, complete = Reader(folder), 0
    for point in range(31):
        first, die_at = 3 * point, 1 + lines * point // 30
        if (child := os.fork()) == 0:
            send_steps(folder, first, die_at if point < 30 else 0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == (point < 30)
        reader.read()
        if reader.position is not None and reader.position.is_complete:
            step = int(reader.state["step"])
            for name, value in Steps().expected(step - step % 3, step).items():
                assert torch.equal(reader.state[name], value), (name, step)
            complete += step // 3 == point
    assert complete >= 5, "the others were killed within an update"
    assert int(reader.state["step"]) == 92


@pytest.mark.multiprocess
def test_the_example_pushes_to_a_process_that_generates_and_is_killed(tmp_path: Path) -> None:
    flags = ("--steps", "3", "--lr", "1e-6", "--kill-at", "2")
    with forked_python(tmp_path) as environment:
        said = torchrun("examples/grpo_engine.py", *flags, environment=environment)
    nbytes = [int(found) for found in re.findall(r"^step \d reward [\d.]+ bytes (\d+)$", said, re.MULTILINE)]
    assert nbytes[0] == nbytes[2] > 10 * nbytes[1], said
    assert "the engine has the weights of the policy" in said
