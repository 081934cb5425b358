"""CPU norms, add, rope, activations, embedding, softmax, log_softmax and argmax against float64."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import QuantizedWeight, reference

sys.path.insert(0, str(Path(__file__).parent))
from kv_pages import positions_of, table_of

SIZES = [1, 3, 8, 17, 63, 172, 4099]
ULP = 2.0**-24  # half a unit in the last place of fp32, relative


def close(got: Tensor, want: Tensor, magnitude: Tensor, roundings: float) -> None:
    """Within so many roundings of the magnitude that was rounded."""
    error = (got.double() - want).abs()
    assert (error <= roundings * ULP * magnitude + 1e-37).all(), (error / magnitude / ULP).max()


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(isa: str, width: int, plus_one: bool) -> None:
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    factor = weight.double() + plus_one
    for added in (None, residual):
        got, total = ops.rms_norm(x, weight, 1e-5, added, plus_one)
        h = x if added is None else x + added
        want = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor
        close(got, want, want.abs() + want.abs() * 0.1 * width**0.5, 6)  # the sum of squares adds the width's part
        assert torch.equal(total, h)
        assert (total is x) == (added is None)


def test_rms_norm_over_heads_of_a_strided_tensor(isa: str) -> None:
    qkv, weight = torch.randn(4, 7, 24), torch.randn(24)
    part = qkv[:, 2:5]
    got, _ = ops.rms_norm(part, weight, 1e-6)
    assert torch.allclose(got, reference.rms_norm(part, weight, 1e-6)[0], rtol=1e-6, atol=1e-7)


def tables(capacity: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(capacity).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "half"), [(8, 4), (64, 32), (80, 20), (128, 64), (6, 3)])
def test_rope(isa: str, width: int, half: int, interleaved: bool) -> None:
    x = torch.randn(5, 9, width)
    part, before = x[:, 2:6], x.clone()
    cos, sin = tables(50, half)
    positions = torch.tensor([0, 49, 7, 7, 13], dtype=torch.int32)
    want = reference.rope(before[:, 2:6].double(), positions, cos.double(), sin.double(), interleaved)
    got = ops.rope(part, positions, cos, sin, interleaved)
    assert got.data_ptr() == part.data_ptr()
    close(part, want, before[:, 2:6].abs().amax(-1, keepdim=True), 4)
    assert torch.equal(x[:, :2], before[:, :2])
    assert torch.equal(x[:, 6:], before[:, 6:])
    assert torch.equal(part[..., 2 * half :], before[:, 2:6, 2 * half :])


def test_rope_of_two_streams(isa: str) -> None:
    x = torch.randn(3, 2, 32)
    before = x.clone()
    cos, sin = tables(20, 8)
    positions = torch.tensor([[1, 5, 19], [0, 2, 7]], dtype=torch.int32)
    ops.rope(x, positions, cos, sin)
    for half, stream in ((slice(0, 16), 0), (slice(16, 32), 1)):
        want = reference.rope(before[..., half], positions[stream], cos, sin)
        assert torch.allclose(x[..., half], want, atol=1e-6)


def test_rope_append_is_the_ops_it_fuses(isa: str) -> None:
    qkv, q_norm, k_norm = torch.randn(3, 8, 16), torch.randn(16), torch.randn(16)
    before = qkv.clone()
    cos, sin = tables(20, 8)
    positions, slots = (torch.tensor(t, dtype=torch.int32) for t in ([4, 0, 19], [1, 0, 1]))
    k_pool, v_pool = torch.zeros(2, 3, 2, ops.PAGE, 16).unbind()
    page_tables = table_of(2, 20)
    q = ops.rope_append(qkv, positions, slots, page_tables, cos, sin, k_pool, v_pool, q_norm, k_norm, 1e-5)
    k_cache, v_cache = (positions_of(pool, page_tables) for pool in (k_pool, v_pool))
    want_q = reference.rope(reference.rms_norm(before[:, :4], q_norm, 1e-5)[0], positions, cos, sin)
    want_k = reference.rope(reference.rms_norm(before[:, 4:6], k_norm, 1e-5)[0], positions, cos, sin)
    assert torch.allclose(q, want_q, atol=1e-5)
    assert torch.allclose(k_cache[slots.long(), :, positions.long()], want_k, atol=1e-5)
    assert torch.equal(v_cache[slots.long(), :, positions.long()], before[:, 6:])


def test_positions_outside_the_tables_are_refused() -> None:
    cos, sin = tables(20, 8)
    for position in (-1, 20):
        with pytest.raises(ValueError, match="outside the tables"):
            ops.rope(torch.randn(1, 1, 16), torch.tensor([position], dtype=torch.int32), cos, sin)


@pytest.mark.parametrize("width", SIZES)
def test_swiglu(isa: str, width: int) -> None:
    gate_up = torch.randn(4, 2 * width) * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 500.0, -500.0, torch.nan
    gate, up = gate_up.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    got = ops.swiglu(gate_up)
    assert got[2, 0].isnan()
    got[2, 0] = want[2, 0] = 0
    close(got, want, want.abs() + 1e-34, 8)


@pytest.mark.parametrize("width", SIZES)
def test_layer_norm(isa: str, width: int) -> None:
    x, residual, weight, bias = torch.randn(5, width) + 3, torch.randn(5, width), torch.randn(width), torch.randn(width)
    for added in (None, residual):
        for offset in (None, bias):
            got, total = ops.layer_norm(x, weight, offset, 1e-5, added)
            h = x if added is None else x + added
            centred = h.double() - h.double().mean(-1, keepdim=True)
            factor = 1 / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            want = centred * factor + (0 if offset is None else offset.double())
            # The mean is off by roundings of the largest element, and so is what it is taken from.
            magnitude = h.double().abs().amax(-1, keepdim=True) * factor.abs() + want.abs()
            close(got, want, magnitude * (1 + 0.1 * width**0.5), 6)
            assert torch.equal(total, h)
            assert (total is x) == (added is None)


@pytest.mark.parametrize("width", SIZES)
def test_add(isa: str, width: int) -> None:
    x, y = torch.randn(5, width), torch.randn(5, 2 * width)[:, :width]
    assert torch.equal(ops.add(x, y), x + y)


def cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def tanh_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


FORMS: dict[ops.Gelu, Callable[[Tensor], Tensor]] = {"erf": cdf, "tanh": tanh_cdf}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", SIZES)
def test_gelu_and_geglu(isa: str, width: int, form: ops.Gelu) -> None:
    """Tanh: roundings of the sigmoid. Erf: half the approximation's 1.5e-7, of four roundings of a polynomial in t with
    terms up to 1.45, and of two roundings of t, of 1 or less, by which the polynomial grows 3.4 times as fast."""
    bound = {"tanh": 4 * ULP, "erf": 0.5 * (1.5e-7 + (4 * 1.45 + 2 * 3.4) * ULP)}[form]
    x = torch.randn(4, 2 * width) * 4
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 80.0, -80.0, torch.nan, 0.0
    gate, up = x.double().chunk(2, -1)
    for got, want, magnitude in (
        (ops.gelu(x, form), x.double() * FORMS[form](x.double()), x.double().abs()),
        (ops.geglu(x, form), gate * FORMS[form](gate) * up, (gate * up).abs()),
    ):
        assert got[2, 0].isnan()
        got[2, 0] = want[2, 0] = magnitude[2, 0] = 0
        assert ((got.double() - want).abs() <= bound * magnitude + 1e-37).all()


@pytest.mark.parametrize("width", SIZES)
def test_silu_and_softcap(isa: str, width: int) -> None:
    x = torch.randn(4, width) * 4
    x[0, 0], x[1, 0] = 1e30, -1e30
    close(
        ops.silu(x), x.double() * torch.sigmoid(x.double()), (x.double() * torch.sigmoid(x.double())).abs() + 1e-30, 8
    )
    for cap in (0.5, 30.0):
        want = cap * torch.tanh(x.double() / cap)
        assert ((ops.softcap(x, cap).double() - want).abs() <= 2e-7 * cap).all()


def test_rows_of_activations_do_not_depend_on_each_other(isa: str) -> None:
    """Widths that are no multiple of a vector: nothing is computed across the end of a row."""
    x, weight, bias = torch.randn(7, 2 * 173), torch.randn(346), torch.randn(346)
    computations: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.gelu(x, "erf"),
        lambda x: ops.geglu(x, "tanh"),
        lambda x: ops.softcap(x, 3.0),
        lambda x: ops.layer_norm(x, weight, bias, 1e-5)[0],
    ]
    for compute in computations:
        assert torch.equal(compute(x), torch.cat([compute(row) for row in x.split(1)]))


@pytest.mark.parametrize("multiplier", [59.86652, 0.5])
def test_embedding_times_a_number(isa: str, make_weight: Callable[..., QuantizedWeight], multiplier: float) -> None:
    ids = torch.tensor([32, 0, 5, 5], dtype=torch.int32)
    for table in (torch.randn(33, 37).bfloat16(), make_weight(33, 37, 4, -1)):
        want = reference.dequantize(table)[ids.long()] * torch.tensor(multiplier)
        assert torch.equal(ops.embedding(ids, table, multiplier=multiplier), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 17, 64, 172])
def test_embedding_of_full_tables(isa: str, dtype: torch.dtype, width: int) -> None:
    table = torch.randn(33, width).to(dtype)
    table[0, 0], table[1, 0] = 6e-8, torch.inf  # a subnormal half
    ids = torch.tensor([32, 0, 1, 5, 5], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, table), table[ids.long()].float())


@pytest.mark.parametrize("form", ["zero_point", "symmetric", "minimum"])
@pytest.mark.parametrize(("width", "group"), [(172, -1), (208, 32), (64, 64), (7, -1)])
def test_embedding_of_quantized_tables(
    isa: str, make_weight: Callable[..., QuantizedWeight], form: str, width: int, group: int
) -> None:
    ids = torch.tensor([32, 0, 7, 8, 9], dtype=torch.int32)
    for bits in (4, 8):
        table = make_weight(33, width, bits, group, form, torch.float16)
        assert torch.equal(ops.embedding(ids, table), reference.dequantize(table)[ids.long()])


def test_ids_outside_the_table_are_refused() -> None:
    for token in (-1, 33):
        with pytest.raises(ValueError, match="outside the table"):
            ops.embedding(torch.tensor([token], dtype=torch.int32), torch.randn(33, 4))


def rows(width: int) -> Tensor:
    """Ordinary, huge, lowest-possible and very uneven rows."""
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width)) * 5
    x[1] = 1e30
    x[2, 0] = 1e30
    x[3] = -torch.inf
    x[4, : width // 2] = -torch.inf
    x[5] *= 20
    return x


@pytest.mark.parametrize("width", SIZES)
def test_softmax(isa: str, width: int) -> None:
    x = rows(width)
    got, want = ops.softmax(x), torch.softmax(x.double(), -1).nan_to_num(0.0)
    assert (got[3] == 0).all()
    # x - maximum is rounded once, relative to itself, which counts in the exponent.
    spread = (x.double() - x.double().amax(-1, keepdim=True)).abs().nan_to_num(0.0, posinf=0.0).clamp(max=90)
    close(got, want, want * (spread + 1) + 1e-37 / ULP, 8)


@pytest.mark.parametrize("width", SIZES)
def test_log_softmax(isa: str, width: int) -> None:
    x = rows(width)
    got, want = ops.log_softmax(x), torch.log_softmax(x.double(), -1)
    assert (got[3] == -torch.inf).all()
    keep = want.isfinite()
    assert torch.equal(got.isfinite()[[0, 1, 2, 4, 5]], keep[[0, 1, 2, 4, 5]])
    close(got[keep], want[keep], want[keep].abs() + 4, 4)


@pytest.mark.parametrize("width", SIZES)
def test_argmax(isa: str, width: int) -> None:
    x = rows(width)
    x[0] = x[0].round()  # ties
    first = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x])
    got = ops.argmax(x)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), first)


@pytest.mark.parametrize("width", SIZES)
def test_mask_logits(isa: str, width: int) -> None:
    """Words of all kinds, a last one that is not whole, rows with a stride; NaN that is not allowed is gone."""
    x = torch.cat([rows(width), torch.zeros(6, 3)], 1)[:, :width]
    allowed = torch.rand(6, width, generator=torch.Generator().manual_seed(width)) < 0.5
    allowed[0], allowed[1] = True, False
    x[1, 0] = torch.nan
    padded = np.pad(allowed.numpy(), ((0, 0), (0, -width % 32)))
    mask = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())
    want = np.where(allowed.numpy(), x.numpy(), -np.inf)
    assert np.array_equal(ops.mask_logits(x, mask).numpy(), want, equal_nan=True)
    assert np.array_equal(reference.mask_logits(x, mask).numpy(), want, equal_nan=True)
    with pytest.raises(ValueError, match="mask, a bit for each logit, must be"):
        ops.mask_logits(x, mask.long())


def test_argmax_never_picks_nan(isa: str) -> None:
    x = torch.full((3, 40), torch.nan)
    x[0, 37], x[1, 3], x[1, 20] = -5.0, -torch.inf, -1.0
    assert ops.argmax(x).tolist() == [37, 20, 0]


def test_nan_stays_nan(isa: str) -> None:
    x = torch.zeros(2, 40)
    x[0, 20] = torch.nan
    assert ops.softmax(x)[0].isnan().all()
    assert ops.log_softmax(x)[0].isnan().all()
    assert ops.softmax(x)[1].isfinite().all()


def test_instruction_sets_agree_bit_for_bit(each_isa: Callable[[Callable[[], Tensor]], list[Tensor]]) -> None:
    x, weight = torch.randn(3, 4098) * 5, torch.randn(4098)
    computations: list[Callable[[], Tensor]] = [
        lambda: ops.rms_norm(x, weight, 1e-5)[0],
        lambda: ops.layer_norm(x, weight, None, 1e-5)[0],
        lambda: ops.swiglu(x),
        lambda: ops.geglu(x, "tanh"),
        lambda: ops.gelu(x, "erf"),
        lambda: ops.softcap(x, 3.0),
        lambda: ops.softmax(x),
        lambda: ops.log_softmax(x),
    ]
    for compute in computations:
        results = each_isa(compute)
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_broken_contracts_are_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        ops.swiglu(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"cap 0.* is not supported"):
        ops.softcap(torch.randn(2, 7), 0.0)
    with pytest.raises(ValueError, match="y must be"):
        ops.add(torch.randn(2, 7), torch.randn(2, 8))
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        ops.rope(torch.randn(1, 1, 8), torch.zeros(1, dtype=torch.int32), *tables(5, 8))
    with pytest.raises(ValueError, match="not empty"):
        ops.softmax(torch.empty(2, 0))
    with pytest.raises(ValueError, match="fp32"):
        ops.embedding(torch.zeros(1, dtype=torch.int32), torch.randn(3, 4), torch.bfloat16)


def test_rows_without_columns_are_refused() -> None:
    nothing, none = torch.empty(2, 0), torch.empty(0)
    for op in (
        lambda: ops.add(nothing, nothing),
        lambda: ops.rms_norm(nothing, none, 1e-5),
        lambda: ops.layer_norm(nothing, none, None, 1e-5),
        lambda: ops.swiglu(nothing),
        lambda: ops.embedding(torch.zeros(1, dtype=torch.int32), torch.empty(3, 0), torch.float32),
    ):
        with pytest.raises(ValueError, match=r"not empty|at least one column"):
            op()


@pytest.mark.parametrize("per_head", [False, True])
def test_layer_norm_of_heads(isa: str, per_head: bool) -> None:
    """With one gain, or one of each head, on strided rows, as q and k lie in a fused projection."""
    x = torch.randn(5, 7 * 24)[:, 24 : 4 * 24].unflatten(1, (3, 24))
    gain, bias = torch.randn(3, 24) if per_head else torch.randn(24), torch.randn(24)
    got, same = ops.layer_norm(x, gain, bias, 1e-5)
    want = torch.nn.functional.layer_norm(x.double(), (24,), eps=1e-5) * gain.double() + bias.double()
    assert same is x
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [1, 17, 172, 4099])
def test_relu_and_scale(isa: str, width: int) -> None:
    x = torch.randn(3, width)
    assert torch.equal(ops.relu(x), x.clamp_min(0))
    assert torch.equal(ops.scale(x, 0.22), x * 0.22)
    assert ops.relu(torch.tensor([[torch.nan, -1.0]])).isnan().tolist() == [[True, False]]
