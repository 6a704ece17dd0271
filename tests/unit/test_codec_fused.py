"""Compiled codecs, as on accelerators, are bitwise equal to eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from composable_fsdp import CommunicationPolicy, ErrorFeedback, Float8, Int4, Int8, fully_shard
from composable_fsdp.trace import Operation, TraceEvent, listeners
from tests._internals import _compiled as fused
from tests.helpers.stream_training import alone

# torch 2.11 leaves the copy into 8-bit floats uncompiled.
UNCOMPILED = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin `<unknown module>.Tensor")


@UNCOMPILED
@pytest.mark.behaviour("E-08")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler warns about its own code
@pytest.mark.parametrize("numel", [77, 9], ids=["blocks", "less than a block"])
@pytest.mark.parametrize("codec", [Int4(block=16), Float8(block=64), Int8(block=32)], ids=repr)
def test_a_compiled_codec_is_bitwise_equal(
    codec: Int4 | Float8 | Int8, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()  # else the code of another size may serve this one
    shapes = ((3, numel), (3, numel))
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(100) for shape in shapes]
    rows[0][2, 3], rows[1][0, 5] = torch.nan, torch.inf
    payloads = [codec.encode(row) for row in rows]
    values = [codec.decode(payload, row.size(1)) for payload, row in zip(payloads, rows, strict=True)]
    compiled: list[Any] = []
    compile_method = fused._compiled

    def compile_and_note(method: Any) -> Any:
        compiled.append(method)
        return compile_method(method)

    monkeypatch.setattr(fused, "_is_compiled_for", lambda device: True)
    monkeypatch.setattr(fused, "_compiled", compile_and_note)
    for row, payload, value in zip(rows, payloads, values, strict=True):
        assert torch.equal(codec.encode(row), payload)
        decoded = codec.decode(payload, row.size(1))
        torch.testing.assert_close(decoded, value, rtol=0, atol=0, equal_nan=True)
    assert len(compiled) == 2 * len(rows)


def test_codecs_on_cpu_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", lambda method: pytest.fail("compiled"))
    Int8().encode(torch.randn(1, 10))


@UNCOMPILED
@pytest.mark.behaviour("E-08")
def test_codecs_are_compiled_in_the_first_forward_before_any_collective(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = {}

    def compile_for_the_host(method: Any) -> Any:
        if method not in compiled:
            compiled[method] = torch.compile(method, dynamic=True, backend="eager")
        return compiled[method]

    monkeypatch.setattr(fused, "_is_compiled_for", lambda device: True)
    monkeypatch.setattr(fused, "_compiled", compile_for_the_host)
    policy = CommunicationPolicy(Int8(block=16), ErrorFeedback(Float8(block=32)), Int4(block=16), min_numel=1)
    graphs = list[int]()

    def note(event: TraceEvent) -> None:
        if event.operation is Operation.COLLECTIVE:
            graphs.append(counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    counters.clear()
    with alone() as mesh:
        model: Any = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 24))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, comm_policy=policy)
        listeners.append(note)
        try:
            for _ in range(3):
                model(torch.randn(2, 40)).sum().backward()
        finally:
            listeners.remove(note)
    assert graphs[0] > 4, "encode and decode of each codec"
    assert graphs[-1] == graphs[0], "nothing is compiled in hooks"
    assert "root: compiling Int8(block=16" in caplog.text
    assert caplog.text.count("compiling") == 1
