"""Sampling on the device: the tokens of the CPU sampler for equal logits, and its distribution."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import SamplingState, cuda, cuda_sample, reference

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.0},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.8, "top_p": 0.95, "repetition": 1.3, "presence": 0.4, "frequency": 0.2},
]


def state_of(rows: int, vocab: int, device: torch.device, fields: dict[str, float]) -> SamplingState:
    """Parameters alone for vocab 0, else also room for bias, prompt and counts."""
    state = SamplingState.greedy(rows, device, vocab)
    for name, value in fields.items():
        getattr(state, name).fill_(value)
    state.seeds.copy_(torch.arange(rows) * 977 - 5)
    return state


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [1, 17, 331, 5000, 40000, 151936, 262144, 262208])
def test_tokens_of_the_reference(vocab: int, filters: dict[str, float]) -> None:
    """Three rows, three steps. Sums of fp32 exponentials against float64: one draw in a million may differ."""
    here, there = (state_of(3, vocab, d, filters) for d in (torch.device("cpu"), DEVICE))
    g = torch.Generator().manual_seed(vocab)
    bias, prompt = torch.randn(3, vocab, generator=g), torch.rand(3, vocab, generator=g).round().to(torch.uint8)
    for state in (here, there):
        assert state.bias is not None
        assert state.prompt is not None
        state.bias.copy_(bias)
        state.prompt.copy_(prompt)
    for _ in range(3):
        logits = torch.randn(3, vocab, generator=g) * 3
        assert ops.sample(logits.to(DEVICE), there).tolist() == reference.sample(logits, here).tolist()
    assert here.counts is not None
    assert there.counts is not None
    assert torch.equal(here.counts, there.counts.cpu())
    assert there.steps.tolist() == [3, 3, 3]


@pytest.mark.sanitize
@pytest.mark.parametrize("vocab", [1, 17, 331, 5000, 151936])
def test_mask_logits(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    x = torch.randn(5, vocab + 3, generator=g)[:, :vocab]
    mask = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=g).int()
    got = ops.mask_logits(x.to(DEVICE), mask.to(DEVICE))
    assert torch.equal(got.cpu(), reference.mask_logits(x, mask))


@pytest.mark.parametrize("filters", FILTERS[1:7])
def test_many_draws_and_ties(filters: dict[str, float]) -> None:
    """4,000 draws of logits in whole steps, so that filters cut among equals; at most one may differ by rounding."""
    vocab, rows = 331, 2000
    here, there = (state_of(rows, 0, d, filters) for d in (torch.device("cpu"), DEVICE))
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2).round()
    differ = sum(
        int((ops.sample(logits.to(DEVICE), there).cpu() != reference.sample(logits, here)).sum()) for _ in range(2)
    )
    assert differ <= 1


def check_draw(rows: int, vocab: int, blocks: int) -> None:
    """One draw with filters that cut among equals."""
    filters = {"temperature": 1.5, "top_k": 20, "top_p": 0.6, "min_p": 0.001}
    here, there = (state_of(rows, 0, d, filters) for d in (torch.device("cpu"), DEVICE))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 2
    logits[:, vocab // 2 : vocab // 2 + 40] = 12.0
    assert (
        cuda_sample.sample(logits.to(DEVICE), there, blocks=blocks).tolist() == reference.sample(logits, here).tolist()
    )


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("blocks", "vocab"), [(1, 331), (2, 5000), (1, 8192), (1, 12288), (1, 16000), (1, 32768), (1, 36864)]
)
def test_every_kernel(blocks: int, vocab: int) -> None:
    """Every size of a thread's share, by few blocks: racecheck did not finish on clusters of 8 and more."""
    check_draw(1, vocab, blocks)


@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(1, 32768), (1, 128256), (1, 151936), (1, 262144), (9, 128256), (9, 262144), (1, 262208), (9, 294912)],
)
def test_every_cluster(rows: int, vocab: int) -> None:
    check_draw(rows, vocab, 0)


@pytest.mark.parametrize("vocab", [300, 40000])
@pytest.mark.parametrize("top_p", [1.0, 0.47, 1e-6, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 40, 299, 4000])
def test_hard_rows(vocab: int, top_k: int, top_p: float) -> None:
    """Rows that leave a coarse search nothing to go by: all equal, few values, both zeros, denormals, huge, masked."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(12, vocab, generator=g)
    x[0] = 2.0
    x[1] = (x[1] > 0.5).float()
    x[2] = torch.where(x[2] > 0, 0.0, -0.0)
    x[3] *= 1e-39
    x[4] *= 1e30
    x[5, x[5] < 1.5] = -torch.inf
    x[6] = x[6].round()
    x[7] = x[7] * 1e-6 + 100
    x[8] = -(x[8].abs()) - 1e4
    x[9, ::3] = torch.nan
    x[10] = -torch.inf
    x[10, vocab // 2] = 1.0
    here, there = (state_of(12, 0, d, {"top_k": top_k, "top_p": top_p}) for d in (torch.device("cpu"), DEVICE))
    for state in (here, there):
        state.temperature.copy_(torch.tensor([1.0, 0.5, 1, 1e-40, 1e29, 1, 2, 1e-6, 3, 0.3, 1, 0]))
    for _ in range(2):
        want = reference.sample(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), here)
        assert ops.sample(x.to(DEVICE), there).tolist() == want.tolist()


def test_the_next_step_s_inputs_are_written() -> None:
    logits = torch.randn(5, 4099, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    rows = torch.tensor([[9] * 5, [1, 7, 0, 100, 3]], dtype=torch.int32, device=DEVICE)
    host = torch.full((2, 5), -9, dtype=torch.int32, pin_memory=True)
    for fields in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}):
        want_state, state = (state_of(5, 0, DEVICE, fields) for _ in range(2))
        for s in (want_state, state):
            s.steps.copy_(torch.tensor([0, 1, 5, 6, 7]))
        want = [ops.sample(logits, want_state).tolist() for _ in range(2)]
        ids, before = rows[0], rows[1].tolist()
        for done in range(2):
            assert ops.sample(logits, state, out=ids, positions=rows[1], host_ids=host) is ids
            assert rows.tolist() == [want[done], [p + 1 + done for p in before]]
            assert [host[(s + done) % 2, i].item() for i, s in enumerate([0, 1, 5, 6, 7])] == want[done]
    with pytest.raises(ValueError, match="out and positions"):
        ops.sample(logits, state_of(5, 0, DEVICE, {}), out=rows[0, :4])


def chi_square(draws: Tensor, weights: Tensor) -> float:
    """The p-value of drawn ids against weights (V,), pooling ids expected fewer than ten times."""
    expected = weights / weights.sum() * draws.numel()
    observed = torch.bincount(draws.long(), minlength=weights.numel()).double()
    assert observed[weights == 0].eq(0).all()
    common = expected >= 10
    pool = [torch.cat((t[common], t[~common].sum().view(1))) for t in (observed, expected)]
    if pool[1][-1] < 5:
        pool = [t[:-1] for t in pool]
        pool[1] = pool[1] * pool[0].sum() / pool[1].sum()
    return float(stats.chisquare(pool[0].numpy(), pool[1].numpy()).pvalue)


@pytest.mark.parametrize("filters", FILTERS[1:4] + FILTERS[5:7])
def test_distribution(filters: dict[str, float]) -> None:
    """60,000 draws over seeds and steps follow the CPU sampler's distribution; fixed seeds, so no flakes."""
    rows, steps, vocab = 3000, 20, 4099
    x = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 2
    state = state_of(rows, 0, DEVICE, filters)
    logits = x.to(DEVICE).expand(rows, vocab).contiguous()
    draws = torch.cat([ops.sample(logits, state) for _ in range(steps)]).cpu()
    weights = reference.token_weights(
        x, filters["temperature"], int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    assert chi_square(draws, weights) > 1e-3


def test_rows_graph_and_unusable_logits() -> None:
    vocab = 128256
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 3
    plain = state_of(9, 0, DEVICE, {"temperature": 0.8, "top_p": 0.95})
    want = torch.stack([ops.sample(logits, plain) for _ in range(5)])
    captured = state_of(9, 0, DEVICE, {"temperature": 0.8, "top_p": 0.95})
    with cuda.programmatic_launch(True), ops.capture(DEVICE) as program:
        ids = ops.sample(logits, captured)
    got = []
    for _ in range(5):
        program.replay()
        got.append(ids.clone())
    assert torch.equal(torch.stack(got), want)
    single = state_of(1, 0, DEVICE, {"temperature": 0.8, "top_p": 0.95})
    single.seeds.copy_(plain.seeds[4:5])
    assert [int(ops.sample(logits[4:5], single)) for _ in range(5)] == want[:, 4].tolist()
    logits[2] = -torch.inf
    logits[3] = torch.nan
    assert ops.sample(logits, plain)[2:4].tolist() == [-1, -1]
