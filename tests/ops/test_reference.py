"""The float32 reference of the ops against torch and transformers: what every kernel test leans on."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from nibblelm import ops, sampler
from nibblelm.ops import SamplingState, reference

sys.path.insert(0, str(Path(__file__).parent))
from kv_pages import paged, positions_of, table_of

SLOTS, KV_HEADS, CAPACITY, D = 2, 2, 96, 16


def case(heads: int, rows: list[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(len(rows), heads, D, generator=g),
        "k_cache": torch.randn(SLOTS, KV_HEADS, CAPACITY, D, generator=g),
        "v_cache": torch.randn(SLOTS, KV_HEADS, CAPACITY, D, generator=g),
        "slots": torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
        "positions": torch.tensor([position for _, position in rows], dtype=torch.int32),
    }


ROWS = [(0, 0), (1, 5), (0, 62), (1, 95)]
COLUMNS = torch.arange(CAPACITY)


def attention(c: dict[str, Any], **options: Any) -> Tensor:
    """The op on pages of the caches."""
    tables = table_of(SLOTS, CAPACITY)
    pools = {name: paged(c[name], tables) for name in ("k_cache", "v_cache")}
    return ops.attention(**(c | pools), tables=tables, scale=0.25, **options)


def sdpa(c: dict[str, Any], allowed: Tensor, bias: Tensor | None = None, scale: float = 0.25) -> Tensor:
    """scaled_dot_product_attention of each row over the whole cache, with the mask written out."""
    rows = []
    for m, slot in enumerate(c["slots"].tolist()):
        mask = torch.where(allowed[m], 0.0, -torch.inf).expand(c["q"].shape[1], 1, CAPACITY)
        mask = mask if bias is None else mask + bias[m]
        out = torch.nn.functional.scaled_dot_product_attention(
            c["q"][m].unsqueeze(1), c["k_cache"][slot], c["v_cache"][slot], mask, scale=scale, enable_gqa=True
        )
        rows.append(out.flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_intervals(heads: int) -> None:
    c = case(heads, ROWS)
    position = c["positions"].unsqueeze(1)
    causal = position >= COLUMNS
    torch.testing.assert_close(attention(c), sdpa(c, causal), atol=1e-5, rtol=1e-5)
    window = causal & (position - COLUMNS < 7)
    torch.testing.assert_close(attention(c, window=7), sdpa(c, window), atol=1e-5, rtol=1e-5)
    prefix = torch.tensor([3, 40, 1, 96], dtype=torch.int32)
    got = attention(c, prefix_lengths=prefix)
    torch.testing.assert_close(got, sdpa(c, causal | (prefix.unsqueeze(1) > COLUMNS)), atol=1e-5, rtol=1e-5)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    got = attention(c, starts=starts)
    padded = causal & (starts[c["slots"].long()].unsqueeze(1) <= COLUMNS)
    torch.testing.assert_close(got, sdpa(c, padded), atol=1e-5, rtol=1e-5)


def test_attention_mask_and_alibi() -> None:
    c = case(4, ROWS)
    causal = c["positions"].unsqueeze(1) >= COLUMNS
    mask = torch.randn(len(ROWS), 90)
    mask[:, 1::3] = -torch.inf
    bias = torch.nn.functional.pad(mask, (0, CAPACITY - 90), value=-torch.inf)
    got = attention(c, mask=mask)
    want = sdpa(c, causal, bias.view(len(ROWS), 1, 1, CAPACITY))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    alibi = build_alibi_tensor(torch.ones(1, CAPACITY), 4, torch.float32).view(4, 1, CAPACITY)
    got = attention(c, alibi_slopes=alibi[:, 0, 1].contiguous())
    torch.testing.assert_close(got, sdpa(c, causal, alibi.expand(len(ROWS), -1, -1, -1)), atol=1e-5, rtol=1e-5)


def test_attention_softcap_and_nothing_to_see() -> None:
    c = case(2, ROWS)
    scores = torch.einsum("mhd,mhpd->mhp", c["q"], c["k_cache"][c["slots"].long()]) * 0.25
    scores = (5 * torch.tanh(scores / 5)).masked_fill(c["positions"].view(-1, 1, 1) < COLUMNS, -torch.inf)
    want = torch.einsum("mhp,mhpd->mhd", scores.softmax(-1), c["v_cache"][c["slots"].long()]).flatten(1)
    torch.testing.assert_close(attention(c, softcap=5.0), want, atol=1e-5, rtol=1e-5)
    starts = torch.tensor([10, 0], dtype=torch.int32)
    got = attention(c, starts=starts)
    assert got[0].eq(0).all()
    assert got[1:].ne(0).all()


def test_layer_norm_and_activations() -> None:
    x, weight, bias = torch.randn(3, 63), torch.randn(63), torch.randn(63)
    want = torch.nn.functional.layer_norm(x + 1, (63,), weight, bias, 1e-5)
    got, h = ops.layer_norm(x, weight, bias, 1e-5, torch.ones(3, 63))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(h, x + 1)
    torch.testing.assert_close(ops.geglu(torch.cat((x, x + 1), 1), "erf"), torch.nn.functional.gelu(x) * (x + 1))
    want = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(ops.gelu(x), want)
    torch.testing.assert_close(ops.silu(x), torch.nn.functional.silu(x))


def test_mask_ops() -> None:
    scores = torch.randn(2, 4, 5, 9)
    forbidden = torch.rand(2, 5, 9).round()
    want = torch.where(forbidden.bool().unsqueeze(1), torch.tensor(-3.0), scores)
    torch.testing.assert_close(ops.attention_mask(scores.clone(), forbidden, -3.0), want)
    alibi = build_alibi_tensor(torch.ones(2, 9), 4, torch.float32).view(2, 4, 1, 9)
    causal = torch.ones(5, 9).tril(4).bool()
    want = torch.where(causal, scores + alibi, torch.tensor(-1e4))
    torch.testing.assert_close(ops.alibi_mask(scores.clone(), alibi[0, :, 0, 1].contiguous()), want)


def test_rope_two_streams() -> None:
    """Complex rotation in float64: the first half of a head by stream 0, the second by stream 1."""
    m, heads, d = 5, 3, 16
    x = torch.randn(m, heads, d)
    positions = torch.randint(0, 50, (2, m), dtype=torch.int32)
    inverse = 10000.0 ** (-torch.arange(0, d // 2, 2, dtype=torch.float64) / (d // 2))
    angles = torch.arange(50).unsqueeze(1) * inverse
    want = []
    for half, stream in zip(x.double().chunk(2, -1), positions, strict=True):
        real, imaginary = half.chunk(2, -1)
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones(m, d // 4).double(), angles[stream]).unsqueeze(
            1
        )
        want += [turned.real, turned.imag]
    got = ops.rope(x.clone(), positions, angles.cos().float(), angles.sin().float())
    torch.testing.assert_close(got, torch.cat(want, -1).float(), atol=1e-5, rtol=1e-5)


def test_rope_append_is_the_ops_it_fuses() -> None:
    m, heads, kv_heads, d = 4, 4, 2, 8
    qkv = torch.randn(m, heads + 2 * kv_heads, d)
    tables = table_of(2, 32)
    k_pool, v_pool = torch.zeros(2, 3, kv_heads, ops.PAGE, d).unbind()
    slots, positions = torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.tensor([3, 9, 4, 10], dtype=torch.int32)
    angles = torch.rand(32, d // 2)
    q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), 1)
    norm = torch.rand(d)
    want_q = reference.rope(reference.rms_norm(q, norm, 1e-6)[0], positions, angles.cos(), angles.sin())
    want_k = reference.rope(reference.rms_norm(k, norm, 1e-6)[0], positions, angles.cos(), angles.sin())
    got = ops.rope_append(
        qkv, positions, slots, tables, angles.cos(), angles.sin(), k_pool, v_pool, norm, norm, interleaved=False
    )
    k_cache, v_cache = positions_of(k_pool, tables), positions_of(v_pool, tables)
    torch.testing.assert_close(got, want_q, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(k_cache[slots.long(), :, positions.long()], want_k, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(v_cache[slots.long(), :, positions.long()], v)


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.7, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 2.0, 5: -9.0}},
]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_sample_is_the_sampler(parameters: dict[str, Any]) -> None:
    """Twenty tokens from the same logits: the ids of `nibblelm.sampler`, with its counts and random numbers."""
    vocab, prompt = 331, [1, 5, 5, 300]
    params = sampler.SamplingParams(**({"top_p": 1.0, "min_p": 0.0} | parameters), seed=2**63 + 11)
    oracle = sampler.Sampler(params, vocab, prompt)
    state = SamplingState.greedy(1, torch.device("cpu"), vocab)
    assert state.prompt is not None
    assert state.bias is not None
    state.prompt[0, prompt] = 1
    for token, bias in parameters.get("logit_bias", {}).items():
        state.bias[0, token] = bias
    settings = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "temperature": "temperature"}
    settings |= {f"{name}_penalty": name for name in ("repetition", "presence", "frequency")}
    for name, field in settings.items():
        getattr(state, field).fill_(getattr(oracle.params, name))
    state.seeds.fill_(2**63 + 11 - 2**64)
    g = torch.Generator().manual_seed(3)
    for step in range(20):
        logits = torch.randn(1, vocab, generator=g) * 3
        assert int(state.steps) == step
        assert int(ops.sample(logits, state)) == oracle.sample(logits[0]).token_id
