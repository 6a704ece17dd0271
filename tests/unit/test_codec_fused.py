"""Compiled codecs, as on accelerators, are bitwise equal to eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composable_fsdp import Float8, Int4, Int8
from tests._internals import _compiled as fused


@pytest.mark.behaviour("E-08")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler warns about its own code
@pytest.mark.parametrize("codec", [Int4(block=16), Float8(block=64)], ids=repr)
def test_a_compiled_codec_is_bitwise_equal(codec: Int4 | Float8, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((3, 77), (3, 77))
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


def test_codecs_on_cpu_and_rotations_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_compiled", lambda method: pytest.fail("compiled"))
    Int8().encode(torch.randn(1, 10))
    monkeypatch.setattr(fused, "_is_compiled_for", lambda device: True)
    Int8(rotate=True).encode(torch.randn(1, 10))
