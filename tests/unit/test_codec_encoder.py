"""The encoder: encoding of rows, the sum of decoded rows, and residuals of error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import Cast, CommunicationPolicy, ErrorFeedback, Float8, Int4, Int8
from composable_fsdp.errors import ConfigurationError
from tests._internals import Encoder, GradientCodec, _encoder

EXACT = Cast(torch.float32)
CODECS: tuple[GradientCodec, ...] = (Int8(), Int4(block=8), Float8(), Cast(), EXACT, ErrorFeedback(Int4(), keep=EXACT))


def values(num_rows: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(seed))


def encoded(encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(rows.size(0), encoder.row_bytes, dtype=torch.uint8)
    encoder.encode(rows.clone(), out)
    return out


@pytest.mark.behaviour("E-09")
@given(st.sampled_from(CODECS), st.integers(1, 5), st.integers(0, 700), st.integers(0, 9))
def test_the_sum_is_that_of_the_decoded_rows_in_their_order(
    codec: GradientCodec, num_rows: int, numel: int, seed: int
) -> None:
    encoder = Encoder(codec, num_rows, numel)
    payload = encoded(encoder, values(num_rows, numel, seed))
    total, expected = torch.full((numel,), torch.nan), torch.zeros(numel)
    encoder.decode_sum(payload, total)
    for r in range(num_rows):
        row = encoder.decode(payload[r : r + 1])[0]
        expected = row.clone() if r == 0 else expected + row
    assert torch.equal(total, expected)


class Short(Int8):
    """Declares larger payloads than it returns."""

    def payload_bytes(self, numel: int) -> int:
        return 4 + super().payload_bytes(numel)


def test_a_codec_must_return_payloads_of_the_declared_shape_and_dtype() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^Short\(.*\.encode made a tensor of \(2, 104\), torch\.uint8, out of one of \(2, 1"
    ):
        encoded(Encoder(Short(), 2, 100), values(2, 100))


def test_rows_are_encoded_in_runs_with_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encoded(Encoder(ErrorFeedback(Int8(block=8)), 7, 100), values(7, 100))
    monkeypatch.setattr(_encoder, "_ELEMENTS_AT_ONCE", 250)
    assert torch.equal(encoded(Encoder(ErrorFeedback(Int8(block=8)), 7, 100), values(7, 100)), payload)


@pytest.mark.behaviour("E-09")
@given(st.sampled_from((Int8(), Int4(), Float8())), st.integers(1, 300), st.integers(1, 12))
def test_sent_values_plus_the_residual_equal_the_gradient(codec: Int8, numel: int, steps: int) -> None:
    encoder = Encoder(ErrorFeedback(codec, keep=EXACT), 2, numel)
    sent = torch.zeros(2, numel)
    wanted = torch.zeros(2, numel)
    for step in range(steps):
        rows = values(2, numel, step)
        wanted += rows
        sent += encoder.decode(encoded(encoder, rows))
    encoder.commit()
    residual = EXACT.decode(encoder.residual(torch.device("cpu")), numel)
    torch.testing.assert_close(sent + residual, wanted, rtol=0, atol=1e-5 * steps)
    assert encoder.rounds == steps


@pytest.mark.behaviour("E-09")
@given(st.sampled_from((Int8(), Int4(), Cast())), st.sets(st.integers(0, 6)))
def test_residuals_of_absent_values_are_kept_until_these_are_present(codec: Int8, rounds: set[int]) -> None:
    encoder, alone = (Encoder(ErrorFeedback(codec, keep=EXACT), 2, 300) for _ in range(2))
    absent = torch.zeros(2, 300, dtype=torch.bool)
    absent[1] = True
    for number in range(7):
        rows, out = values(2, 300, number), torch.empty(2, encoder.row_bytes, dtype=torch.uint8)
        if number in rounds:
            rows[1] = 0.0
            encoder.encode(rows, out, absent)
            assert not encoder.decode(out)[1].any()
        else:
            encoder.encode(rows.clone(), out)
            assert torch.equal(encoded(alone, rows)[1], out[1])


@pytest.mark.behaviour("E-09")
def test_errors_of_a_constant_gradient_cancel_only_with_feedback() -> None:
    gradient = values(1, 4096)
    errors = {}
    for codec in (
        Int4(),
        ErrorFeedback(Int4()),
        ErrorFeedback(Int4(), decay=0.5),
        ErrorFeedback(Int4(), reset_every=2),
    ):
        encoder = Encoder(codec, 1, 4096)
        sent = sum((encoder.decode(encoded(encoder, gradient)) for _ in range(50)), torch.zeros(1, 4096))
        errors[codec] = ((sent / 50 - gradient).norm() / gradient.norm()).item()
    without, full, half, short = errors.values()
    assert full < without / 20
    assert full < half < without
    assert full < short < without


@pytest.mark.behaviour("E-09")
def test_a_residual_is_dropped_after_so_many_rounds() -> None:
    encoder = Encoder(ErrorFeedback(Int4(), reset_every=3), 1, 64)
    first = encoded(encoder, values(1, 64))
    second = encoded(encoder, values(1, 64))
    encoded(encoder, values(1, 64))
    encoder.commit()
    assert not torch.equal(first, second)
    assert encoder.rounds == 0
    assert torch.equal(encoded(encoder, values(1, 64)), first)


@pytest.mark.behaviour("E-09")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_value_is_sent_and_leaves_no_residual(bad: float) -> None:
    encoder = Encoder(ErrorFeedback(Int8(block=16)), 1, 64)
    rows = values(1, 64)
    rows[0, 3] = bad
    assert not encoder.decode(encoded(encoder, rows))[0, :16].isfinite().any()
    assert encoder.decode(encoded(encoder, values(1, 64))).isfinite().all()


@pytest.mark.behaviour("J-03")
@given(st.integers(1, 3), st.integers(0, 5), st.sampled_from([None, 2]))
def test_a_rolled_back_step_restores_the_residual(per_step: int, failed: int, reset_every: int | None) -> None:
    codec = ErrorFeedback(Int4(), reset_every=reset_every)
    encoder, undisturbed = Encoder(codec, 2, 100), Encoder(codec, 2, 100)
    for step in range(6):
        if step == failed:
            for i in range(per_step):
                encoded(encoder, values(2, 100, 90 + i))
            encoder.roll_back()
            encoder.roll_back()
        for i in range(per_step):
            rows = values(2, 100, 10 * step + i)
            assert torch.equal(encoded(encoder, rows), encoded(undisturbed, rows))
        before = encoder.residual(torch.device("cpu")).clone(), encoder.rounds
        for each in (encoder, undisturbed):
            each.commit()
        assert not torch.equal(before[0], encoder.residual(torch.device("cpu"))) or before[1] == 0 == encoder.rounds


def test_a_restored_encoder_continues_like_the_saved_one() -> None:
    codec = ErrorFeedback(Int4(), reset_every=4)
    encoder, restored = Encoder(codec, 2, 100), Encoder(codec, 2, 100)
    for step in range(3):
        encoded(encoder, values(2, 100, step))
    encoder.commit()
    restored.restore(encoder.residual(torch.device("cpu")), encoder.rounds)
    for step in range(3, 8):
        assert torch.equal(encoded(encoder, values(2, 100, step)), encoded(restored, values(2, 100, step)))


def test_the_residual_codec_may_depend_on_the_parameter() -> None:
    codec = ErrorFeedback(Int4(), keep=Float8(per_row=True)).for_parameter((3, 7))
    assert codec == ErrorFeedback(Int4(), keep=Float8(block=7))


@dataclass
class Unhashable:
    """Compares by value and is mutable, so it has no hash."""

    payload_bytes = Int8.payload_bytes
    encode = Int8.encode
    decode = Int8.decode


@pytest.mark.behaviour("E-09")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ErrorFeedback(ErrorFeedback(Int8())), "takes a codec without error feedback of its own"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Int8(), decay=0.0), r"decay=\.\.\.\) must be above 0 and at most 1, not 0\.0"),
        (lambda: ErrorFeedback(Int8(), decay=1.5), r"decay=\.\.\.\) must be above 0 and at most 1, not 1\.5"),
        (lambda: ErrorFeedback(Int8(), reset_every=0), r"reset_every=\.\.\.\) is a whole number, .* or None, not 0"),
        (lambda: ErrorFeedback(Int8(), reset_every=2.5), r"is a whole number, at least 1, or None, not 2\.5"),  # type: ignore[arg-type]
        (lambda: Int8(block=2.0), r"a block is a whole number of elements, at least one, not 2\.0"),  # type: ignore[arg-type]
        (lambda: CommunicationPolicy(min_numel=-1), r"min_numel=\.\.\.\) is a number of elements, not -1"),
        (lambda: CommunicationPolicy(all_gather=ErrorFeedback(Int8())), "parameters are sent anew each time"),  # type: ignore[arg-type]
        (lambda: CommunicationPolicy(reduce_scatter="int8"), r"reduce_scatter=\.\.\.\) takes a codec, with methods"),  # type: ignore[arg-type]
        (lambda: CommunicationPolicy(all_gather=Int8), r"all_gather=\.\.\.\) takes a codec, .*, not <class"),  # type: ignore[arg-type]
        (
            lambda: CommunicationPolicy(all_reduce=cast(Any, Unhashable())),
            r"hashable codec, .* Unhashable is not hashable: make it a frozen datac",
        ),
        (lambda: ErrorFeedback(3), r"ErrorFeedback\(codec=\.\.\.\) takes a codec, .*, not 3"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Int8(), keep=ErrorFeedback(Int8())), r"keep=\.\.\.\) takes a codec, .*, not ErrorF"),  # type: ignore[arg-type]
    ],
)
def test_invalid_codec_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()  # type: ignore[operator]
