"""The float32 oracle in plain PyTorch: the definition of every op of the contract. Slow and obvious on purpose."""

import torch
from torch import Tensor

from nibblelm.ops.sampling_state import SamplingState
from nibblelm.ops.types import PAGE, Int8Pages, Pages, QuantizedWeight, Weight


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """int32 words (R, W), low code first -> unsigned codes (R, count) as int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.reshape(packed.shape[0], -1)[:, :count]


def dequantize(weight: Weight) -> Tensor:
    """The (N, K) fp32 matrix that a weight stands for."""
    if isinstance(weight, Tensor):
        return weight.float()
    n, k = weight.shape
    group = k if weight.group_size == -1 else weight.group_size
    codes = unpack_codes(weight.codes, weight.bits, k).float()
    scale = weight.scale.float().repeat_interleave(group, 1)[:, :k]
    if weight.minimum is not None:
        return codes * scale + weight.minimum.float().repeat_interleave(group, 1)[:, :k]
    if weight.zero_point is None:
        return (codes - (1 << (weight.bits - 1))) * scale
    zero = unpack_codes(weight.zero_point.T.contiguous(), weight.bits, n).T.float()
    return (codes - zero.repeat_interleave(group, 1)[:, :k]) * scale


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    y = x.float() @ dequantize(weight).T
    return y if bias is None else y + bias


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    y = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    return y * (weight.float() + 1 if plus_one else weight.float()), h


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    centred = h.float() - h.float().mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype), h


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    if positions.ndim == 2:
        halves = zip(x.chunk(2, -1), positions, strict=True)
        return torch.cat([rope(half, stream, cos, sin, interleaved) for half, stream in halves], -1)
    half = cos.shape[1]
    c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    rotated = x[..., : 2 * half].float()
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.split(half, -1)
    first, second = a * c - b * s, b * c + a * s
    joined = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((joined, x[..., 2 * half :].float()), -1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes (..., D) and scales (...) of `Int8Pages` for x (..., D); all codes are 0 where x is not finite."""
    top = x.float().abs().amax(-1).clamp_min(2.0**-100)
    inverse = torch.div(torch.full_like(top, 127), top)  # a number over a tensor is its reciprocal, rounded, times it
    codes = (x.float() * inverse.unsqueeze(-1)).round()
    return codes.where(top.isfinite().unsqueeze(-1), 0).to(torch.int8), top / 127


def cached(cache: Pages, table: Tensor, first: int, end: int) -> Tensor:
    """Positions [first, end) of the slot with this table (W,), in fp32: (P, Hkv, PAGE, D) -> (Hkv, end - first, D)."""
    places = torch.arange(first, end, device=table.device)
    pages = table[places // PAGE].long()
    if ((pages < 0) | (pages >= cache.shape[0])).any():
        raise ValueError(f"a page of positions {first} to {end} is outside the cache of {cache.shape[0]} pages")
    rows = places % PAGE
    if isinstance(cache, Int8Pages):
        scales = cache.scales[pages, :, rows].unsqueeze(-1)
        return (cache.codes[pages, :, rows] * scales).transpose(0, 1)
    return cache[pages, :, rows].float().transpose(0, 1)


def attention(
    q: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    rows, heads_per_kv = [], q.shape[1] // k_cache.shape[1]
    for m, (row, slot, position) in enumerate(zip(q.float(), slots.tolist(), positions.tolist(), strict=True)):
        end = max(position + 1, 0 if prefix_lengths is None else int(prefix_lengths[m]))
        end = end if mask is None else min(end, mask.shape[1])
        first = max(0, position + 1 - window) if window > 0 else 0
        first = min(end, first if starts is None else max(first, int(starts[slot])))
        k, v = (cached(t, tables[slot], first, end).repeat_interleave(heads_per_kv, 0) for t in (k_cache, v_cache))
        scores = torch.einsum("hd,hpd->hp", row, k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            distance = torch.arange(first - position, end - position, device=q.device)
            scores = scores + alibi_slopes.float().unsqueeze(1) * distance
        if mask is not None:
            scores = scores + mask[m, first:end].float()
        rows.append(torch.einsum("hp,hpd->hd", softmax(scores), v).flatten())
    return torch.stack(rows).to(q.dtype)


def attention_mask(scores: Tensor, mask: Tensor, value: float = -10000.0) -> Tensor:
    return scores.masked_fill_(mask.unsqueeze(1) > 0.99, value)


def alibi_mask(scores: Tensor, slopes: Tensor, value: float = -10000.0) -> Tensor:
    queries, keys = scores.shape[-2:]
    columns = torch.arange(keys, device=scores.device)
    allowed = columns <= torch.arange(keys - queries, keys, device=scores.device).unsqueeze(1)
    biased = scores.float() + slopes.float().view(-1, 1, 1) * columns
    return scores.copy_(torch.where(allowed, biased, value))


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def geglu(gate_up: Tensor, form: str = "tanh") -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (gelu(gate, form) * up).to(gate_up.dtype)


def gelu(x: Tensor, form: str = "tanh") -> Tensor:
    return torch.nn.functional.gelu(x.float(), approximate="tanh" if form == "tanh" else "none").to(x.dtype)


def silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def scale(x: Tensor, factor: float) -> Tensor:
    return (x.float() * factor).to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def embedding(ids: Tensor, table: Weight, multiplier: float = 1.0) -> Tensor:
    return dequantize(table)[ids.long()] * multiplier


def softmax(x: Tensor) -> Tensor:
    empty = (x == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(x.float(), -1))


def log_softmax(x: Tensor) -> Tensor:
    empty = (x == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, -torch.inf, torch.log_softmax(x.float(), -1))


def argmax(x: Tensor) -> Tensor:
    highest = x.max(-1, keepdim=True).values
    columns = torch.arange(x.shape[-1])
    return torch.where(x == highest, columns, x.shape[-1]).min(-1).values.int()


def mask_logits(x: Tensor, mask: Tensor) -> Tensor:
    columns = torch.arange(x.shape[1])
    allowed = mask[:, columns // 32] >> (columns % 32) & 1
    return torch.where(allowed == 1, x, -torch.inf)


def philox_uniform(seed: int, step: int) -> float:
    """Word 0 of Philox-4x32-10 (Salmon et al. 2011) at counter `step` under key `seed`, over 2**32."""
    c, k = [step & 0xFFFFFFFF, step >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c[0] / 2**32


def penalised(logits: Tensor, state: SamplingState) -> Tensor:
    """Bias, repetition, frequency and presence penalties on logits (M, V)."""
    x = logits.float() if state.bias is None else logits.float() + state.bias
    counts = torch.zeros(x.shape, dtype=torch.int32) if state.counts is None else state.counts
    seen = counts > 0 if state.prompt is None else (counts > 0) | (state.prompt > 0)
    repetition = state.repetition.unsqueeze(1)
    x = torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)
    x = x - state.frequency.unsqueeze(1) * counts
    return torch.where(counts > 0, x - state.presence.unsqueeze(1), x)


def token_weights(x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """exp((x - max) / temperature) of penalised logits (V,) in float64, 0 for tokens that are filtered out."""
    weights = torch.exp((x.double() - x.max().double()) / max(temperature, 1e-30))
    if 0 < top_k < x.numel():
        weights = torch.where(x >= x.topk(top_k).values[-1], weights, 0.0)
    if top_p < 1:
        order = torch.sort(x, descending=True, stable=True).indices
        before = weights[order].cumsum(0) - weights[order]
        dropped = before >= top_p * weights.sum()
        dropped[0] = False
        weights[order[dropped]] = 0.0
    return torch.where(weights >= min_p, weights, 0.0)


def sample(
    logits: Tensor,
    state: SamplingState,
    out: Tensor | None = None,
    positions: Tensor | None = None,
    host_ids: Tensor | None = None,
) -> Tensor:
    ids = []
    for row, x in enumerate(penalised(logits, state)):
        filters = (state.temperature, state.top_k, state.top_p, state.min_p)
        temperature, top_k, top_p, min_p = (t[row].item() for t in filters)
        if not bool(torch.isfinite(x.max())):
            ids.append(-1)
        elif temperature == 0:
            ids.append(int(argmax(x.unsqueeze(0))))
        else:
            sums = token_weights(x, temperature, int(top_k), top_p, min_p).cumsum(0)
            u = philox_uniform(int(state.seeds[row]) % 2**64, int(state.steps[row]))
            ids.append(int(torch.searchsorted(sums, u * sums[-1], right=True)))
        if state.counts is not None and ids[-1] >= 0:
            state.counts[row, ids[-1]] += 1
        if host_ids is not None:
            host_ids[state.steps[row] % 2, row] = ids[-1]
    state.steps.add_(1)
    if positions is not None:
        positions.add_(1)
    return (torch.empty(len(ids), dtype=torch.int32) if out is None else out).copy_(torch.tensor(ids))


__all__ = [
    "QuantizedWeight",
    "Weight",
    "alibi_mask",
    "argmax",
    "attention",
    "attention_mask",
    "cached",
    "dequantize",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "log_softmax",
    "mask_logits",
    "quantize_rows",
    "relu",
    "rms_norm",
    "rope",
    "sample",
    "scale",
    "silu",
    "softcap",
    "softmax",
    "swiglu",
    "unpack_codes",
]
