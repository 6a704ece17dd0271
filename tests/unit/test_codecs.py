"""Codecs: error bounds for any values, independence of rows, compiled codecs, and the encoder of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp import Cast, CommunicationPolicy, ErrorFeedback, Float8, Int4, Int8
from composable_fsdp.codecs.protocol import resolve_codec
from composable_fsdp.errors import ConfigurationError
from tests._internals import Encoder, GradientCodec, _encoder
from tests._internals import _compiled as fused

FLOAT = torch.finfo(torch.float32)
SMALLEST = 2.0**-149
EXTREMES = st.sampled_from(
    [0.0, -0.0, FLOAT.max, -FLOAT.max, 1e38, FLOAT.tiny, SMALLEST, -SMALLEST, 1.0, 0.9999, -3e-41]
)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | EXTREMES


@st.composite
def finite_rows(draw: st.DrawFn) -> torch.Tensor:
    """Draw either a few values, or rows near the block size in length with values of random magnitudes."""
    if draw(st.booleans()):
        numel = draw(st.integers(0, 40))
        rows = draw(st.lists(st.lists(VALUES, min_size=numel, max_size=numel), min_size=1, max_size=3))
        return torch.tensor(rows, dtype=torch.float32)
    shape = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257, 511, 513]))
    lowest, highest = draw(st.sampled_from([(-45, 39), (-2, 2), (36, 39), (-45, -36)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(lowest, highest, shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponents
    return values.clamp(-FLOAT.max, FLOAT.max).float()


def round_trip(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    before = rows.clone()
    payload = codec.encode(rows)
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    assert payload.shape == (rows.size(0), codec.payload_bytes(rows.size(1)))
    sent = payload.clone()
    decoded: torch.Tensor = codec.decode(payload, rows.size(1))
    assert decoded.shape == rows.shape
    assert decoded.dtype == torch.float32
    assert torch.equal(payload, sent)
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)
    return decoded


BLOCKWISE = [Int8(), Int8(block=5), Int8(block=1), Int4(), Int4(block=3), Float8(), Float8(block=7), Float8(block=256)]
CASTS = [Cast(), Cast(torch.float16)]
CODECS = BLOCKWISE + CASTS
codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)
scaling = pytest.mark.parametrize("codec", BLOCKWISE, ids=repr)


def largest_of_block(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each element's block, in the shape of ``rows``."""
    block = codec.block or max(1, rows.size(1))
    out = torch.zeros_like(rows)
    for start in range(0, rows.size(1), block):
        part = rows[:, start : start + block]
        out[:, start : start + block] = part.abs().amax(dim=1, keepdim=True)
    return out


def bound(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the documented error bound, plus tolerances for the rounding of the scale and for values near zero."""
    if isinstance(codec, Cast):
        info = torch.finfo(codec.dtype)
        fits = rows.abs() <= info.max
        return torch.where(fits, rows.abs().double() * info.eps / 2 + info.smallest_normal, torch.inf)
    largest = largest_of_block(codec, rows).double()
    if isinstance(codec, Float8):
        error = torch.maximum(rows.abs().double() / 16, largest / 2**18)
    else:
        error = largest / (2 * (127 if isinstance(codec, Int8) else 7))
    return error * (1 + 1e-5) + FLOAT.tiny * (448 if isinstance(codec, Float8) else 127)


@pytest.mark.behaviour("E-08")
@codecs
@settings(max_examples=40)
@given(rows=finite_rows())
def test_the_error_of_any_finite_values_is_bounded(codec: Any, rows: torch.Tensor) -> None:
    error = (round_trip(codec, rows).double() - rows.double()).abs()
    assert (error <= bound(codec, rows)).all(), (error, bound(codec, rows))


@pytest.mark.behaviour("E-08")
@scaling
@settings(max_examples=30)
@given(rows=finite_rows(), data=st.data())
def test_a_block_with_nan_or_infinity_is_nan_and_others_are_unchanged(codec: Any, rows: torch.Tensor, data) -> None:
    if not rows.numel():
        return
    bad = torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, rows.size(0) - 1)), data.draw(st.integers(0, rows.size(1) - 1))] = True
    in_bad_blocks = largest_of_block(codec, bad.float()) > 0
    broken = rows.masked_fill(bad, data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])))
    expected = round_trip(codec, rows).masked_fill(in_bad_blocks, torch.nan)
    torch.testing.assert_close(round_trip(codec, broken), expected, rtol=0, atol=0, equal_nan=True)
    # The conversion of nan to an integer depends on the machine. Payloads must not depend on it: all non-finite values
    # have the same payload.
    assert torch.equal(codec.encode(broken), codec.encode(rows.masked_fill(bad, -torch.inf)))


@pytest.mark.behaviour("E-08")
@pytest.mark.parametrize("codec", CASTS, ids=repr)
def test_a_cast_keeps_nan_and_infinity_where_they_are(codec: Cast) -> None:
    rows = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 0.0]])
    torch.testing.assert_close(round_trip(codec, rows), rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.behaviour("E-08")
@codecs
@settings(max_examples=20)
@given(rows=finite_rows())
def test_blocks_do_not_span_rows_of_several_ranks(codec: Any, rows: torch.Tensor) -> None:
    payload, numel = codec.encode(rows), rows.size(1)
    assert torch.equal(payload, torch.cat([codec.encode(row.unsqueeze(0)) for row in rows]))
    decoded = codec.decode(payload, numel)
    assert torch.equal(decoded, torch.cat([codec.decode(row.clone().unsqueeze(0), numel) for row in payload]))


@pytest.mark.behaviour("E-08")
@codecs
def test_decoded_values_are_encoded_again_without_loss(codec: Any) -> None:
    rows = torch.randn(3, 512, generator=torch.Generator().manual_seed(3))
    once = round_trip(codec, rows)
    torch.testing.assert_close(round_trip(codec, once), once, rtol=1e-5, atol=1e-5)


@pytest.mark.behaviour("E-08")
@codecs
def test_payloads_may_be_columns_and_values_may_have_another_dtype(codec: Any) -> None:
    rows = torch.randn(2, 37, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(rows)
    wide = torch.zeros(2, payload.size(1) + 24, dtype=torch.uint8)
    wide[:, 8 : 8 + payload.size(1)] = payload
    assert torch.equal(codec.decode(wide[:, 8 : 8 + payload.size(1)], 37), codec.decode(payload, 37))
    assert torch.equal(codec.encode(rows.repeat(1, 2)[:, :37]), payload)
    for half in (rows.bfloat16(), rows.half()):
        assert torch.equal(round_trip(codec, half), round_trip(codec, half.float()))
    torch.testing.assert_close(round_trip(codec, rows.double()), round_trip(codec, rows), rtol=1e-6, atol=1e-6)


@pytest.mark.behaviour("E-08")
def test_encoded_sizes_follow_from_the_number_of_bits() -> None:
    assert Int8(block=256).payload_bytes(1024) == 1024 + 4 * 4
    assert Int4(block=128).payload_bytes(1024) == 512 + 4 * 8
    assert Float8().payload_bytes(1024) == 1024 + 4
    assert Cast().payload_bytes(1024) == 2048
    assert Int4(block=4).payload_bytes(5) == 4 + 4 * 2  # three bytes, padded to the alignment of a scale
    assert Float8().payload_bytes(0) == Float8(block=3).payload_bytes(0) == Int8().payload_bytes(0) == 0


EXACT = Cast(torch.float32)
GRADIENT_CODECS: tuple[GradientCodec, ...] = (
    Int8(),
    Int4(block=8),
    Float8(),
    Cast(),
    EXACT,
    ErrorFeedback(Int4(), keep=EXACT),
)


def values(num_rows: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(seed))


def encoded(encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(rows.size(0), encoder.row_bytes, dtype=torch.uint8)
    encoder.encode(rows.clone(), out)
    return out


def decoded(encoder: Encoder, payload: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row alone."""
    out = torch.full((payload.size(0), encoder.numel), torch.nan)
    for row, total in zip(payload, out, strict=True):
        encoder.decode_sum(row.unsqueeze(0), total)
    return out


@pytest.mark.behaviour("E-09")
@given(st.sampled_from(GRADIENT_CODECS), st.integers(1, 5), st.integers(0, 700), st.integers(0, 9))
def test_the_sum_is_that_of_the_decoded_rows_in_their_order(codec, num_rows: int, numel: int, seed: int) -> None:
    encoder = Encoder(codec, num_rows, numel)
    payload = encoded(encoder, values(num_rows, numel, seed))
    total, expected = torch.full((numel,), torch.nan), torch.zeros(numel)
    encoder.decode_sum(payload, total)
    for r in range(num_rows):
        row = decoded(encoder, payload[r : r + 1])[0]
        expected = row.clone() if r == 0 else expected + row
    assert torch.equal(total, expected)


class Short(Int8):
    """Declares larger payloads than it returns."""

    def payload_bytes(self, numel: int) -> int:
        return 4 + super().payload_bytes(numel)


def test_a_codec_must_return_payloads_of_the_declared_shape_and_dtype() -> None:
    text = r"^Short\(.*\.encode made a tensor of \(2, 104\), torch\.uint8, out of one of \(2, 1"
    with pytest.raises(ConfigurationError, match=text):
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
        sent += decoded(encoder, encoded(encoder, rows))
    encoder.commit()
    assert encoder._residual is not None
    residual = EXACT.decode(encoder._residual, numel)
    torch.testing.assert_close(sent + residual, wanted, rtol=0, atol=1e-5 * steps)


@pytest.mark.behaviour("E-09")
def test_errors_of_a_constant_gradient_cancel_only_with_feedback() -> None:
    gradient = values(1, 4096)
    errors = {}
    for codec in (Int4(), ErrorFeedback(Int4()), ErrorFeedback(Int4(), decay=0.5)):
        encoder = Encoder(codec, 1, 4096)
        sent = sum((decoded(encoder, encoded(encoder, gradient)) for _ in range(50)), torch.zeros(1, 4096))
        errors[codec] = ((sent / 50 - gradient).norm() / gradient.norm()).item()
    without, full, half = errors.values()
    assert full < without / 20
    assert full < half < without


@pytest.mark.behaviour("E-09")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_value_is_sent_and_leaves_no_residual(bad: float) -> None:
    encoder = Encoder(ErrorFeedback(Int8(block=16)), 1, 64)
    rows = values(1, 64)
    rows[0, 3] = bad
    assert not decoded(encoder, encoded(encoder, rows))[0, :16].isfinite().any()
    assert decoded(encoder, encoded(encoder, values(1, 64))).isfinite().all()


@pytest.mark.behaviour("J-03")
@given(st.integers(1, 3), st.integers(0, 5))
def test_a_rolled_back_step_restores_the_residual(per_step: int, failed: int) -> None:
    codec = ErrorFeedback(Int4())
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
        for each in (encoder, undisturbed):
            assert each.has_changed
            each.commit()
            assert not each.has_changed


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
        (lambda: ErrorFeedback(ErrorFeedback(Int8())), r"ErrorFeedback\(codec=\.\.\.\) takes a codec, .*, not ErrorF"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Int8(), decay=0.0), r"decay=\.\.\.\) must be above 0 and at most 1, not 0\.0"),
        (lambda: ErrorFeedback(Int8(), decay=1.5), r"decay=\.\.\.\) must be above 0 and at most 1, not 1\.5"),
        (lambda: ErrorFeedback(Int8(), reset_every=9), "^ErrorFeedback has no reset_every= in this version: "),  # type: ignore[call-arg]
        (lambda: CommunicationPolicy(all_reduce=Int8()), "^CommunicationPolicy has no all_reduce= in this version: "),  # type: ignore[call-arg]
        *((lambda kind=kind: kind(block=0), "at least one, not 0") for kind in (Int8, Int4, Float8)),
        (lambda: Cast(torch.float64), r"Cast takes torch.bfloat16, torch.float16 or torch.float32, not torch.f"),
        (lambda: Float8(block=4, per_row=True), r"Float8 takes block=4 or per_row=True, not both\."),
        (lambda: Int8(block=2.0), r"a block is a whole number of elements, at least one, not 2\.0"),  # type: ignore[arg-type]
        (lambda: CommunicationPolicy(min_numel=-1), r"min_numel=\.\.\.\) is a number of elements, not -1"),
        (
            lambda: CommunicationPolicy(all_gather=ErrorFeedback(Int8())),  # type: ignore[arg-type]
            r"all_gather=.* a codec, .*, not ErrorF",
        ),
        (lambda: CommunicationPolicy(reduce_scatter="int8"), r"reduce_scatter=\.\.\.\) takes a codec, with methods"),  # type: ignore[arg-type]
        (lambda: CommunicationPolicy(all_gather=Int8), r"all_gather=\.\.\.\) takes a codec, .*, not <class"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(3), r"ErrorFeedback\(codec=\.\.\.\) takes a codec, .*, not 3"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Int8(), keep=ErrorFeedback(Int8())), r"keep=\.\.\.\) takes a codec, .*, not ErrorF"),  # type: ignore[arg-type]
    ],
)
def test_invalid_codec_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()  # type: ignore[operator]


# torch 2.11 leaves the copy into 8-bit floats uncompiled.
UNCOMPILED = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin `<unknown module>.Tensor")


@UNCOMPILED
@pytest.mark.behaviour("E-08")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler warns about its own code
@pytest.mark.parametrize(
    ("codec", "numel"),
    [(Int4(block=16), 77), (Int4(block=16), 9), (Float8(block=64), 77)],  # 9: less than a block
    ids=repr,
)
def test_a_compiled_codec_is_bitwise_equal(codec: Int4 | Float8, numel: int, monkeypatch) -> None:
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


@pytest.mark.parametrize(
    ("shape", "block"), [((6, 10), 10), ((6, 3, 2, 2), 12), ((6, 1), 1), ((7,), 7), ((), 1), ((0, 4), 4), ((4, 0), 1)]
)
def test_a_row_is_what_an_index_of_the_first_dim_selects(shape: tuple[int, ...], block: int) -> None:
    resolved = resolve_codec(Float8(per_row=True), torch.Size(shape))
    assert resolved == Float8(block=block)
    assert resolve_codec(resolved, shape) == resolved
    for codec in (Float8(), Float8(block=3), Int8(), Int4(), Cast()):
        assert resolve_codec(codec, shape) is codec


@pytest.mark.behaviour("E-08")
@given(num_rows=st.integers(1, 5), length=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_error_of_a_row_does_not_depend_on_other_rows(num_rows: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** torch.randint(-20, 20, (num_rows, 1), generator=generator)
    parameter = torch.randn(num_rows, length, generator=generator) * magnitudes
    codec = resolve_codec(Float8(per_row=True), parameter.shape)
    payload = codec.encode(parameter.view(1, -1))
    alone = Float8().decode(Float8().encode(parameter), length)
    assert torch.equal(codec.decode(payload, parameter.numel()).view_as(parameter), alone)
    assert payload.numel() == -(-parameter.numel() // 4) * 4 + 4 * num_rows


def test_a_per_row_codec_without_a_parameter_encodes_nothing() -> None:
    codec = Float8(per_row=True)
    uses = (
        lambda: codec.encode(torch.ones(1, 4)),
        lambda: codec.decode(torch.zeros(1, 8, dtype=torch.uint8), 4),
        lambda: codec.payload_bytes(4),
    )
    for use in uses:
        with pytest.raises(ConfigurationError, match=r"how long a row is. Call for_parameter\(shape\)"):
            use()
