"""Log-probabilities of a token and of the most likely ones against float64: equals, zeros of both signs, -inf."""

import numpy as np
import pytest
import torch

from nibblelm import ops
from nibblelm.ops import cuda, top_logprobs
from nibblelm.sampler import scored, token_logprobs

USABLE, REASON = cuda.available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]),
]


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Of which many are equal, zero, minus zero or -inf."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    x[1::3] = (x[1::3] / 4).round()
    x[2::3, 1::2] *= -0.0
    x[2::3, ::7] = 0.0
    x[:, 5::11] = -torch.inf
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 7, 400])
@pytest.mark.parametrize("vocab", [1, 3, 17, 331, 4099, 151936])
def test_against_float64(vocab: int, count: int, device: str) -> None:
    x = logits_of(7, vocab)
    tokens = torch.tensor([0, vocab - 1, vocab // 2, -1, 0, 0, vocab // 3], dtype=torch.int32)
    rows = torch.tensor([6, 0, 1, 2, 4])
    scores, ids = (t.cpu() for t in ops.top_logprobs(*(t.to(device) for t in (x, tokens, rows)), count))
    assert scores.shape == (5, 1 + min(count, vocab))
    for row, own, names in zip(rows.tolist(), scores.double().numpy(), ids.numpy(), strict=True):
        exact = x[row].double().numpy()
        exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        order = np.lexsort((np.arange(vocab), -exact))[:count]
        assert names.tolist() == order.tolist()
        # rounding of differences of up to 40, and of the logarithm of a sum of fp32 exponentials
        np.testing.assert_allclose(own, exact[[tokens[row], *order]], rtol=3e-7, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_depend_on_each_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, tokens, rows = logits_of(40, 5000).to(device), torch.arange(40).int().to(device), torch.arange(40).to(device)
    together = ops.top_logprobs(x, tokens, rows, 9)
    monkeypatch.setattr("nibblelm.ops.logprobs.AT_ONCE", 15000)
    for got, want in zip(ops.top_logprobs(x, tokens, rows, 9), together, strict=True):
        assert torch.equal(got, want)
    for row in range(40):
        one = ops.top_logprobs(x[row : row + 1], tokens[row : row + 1], rows[:1], 9)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(one, together, strict=True))


def test_what_the_host_reports() -> None:
    """The same tokens, none of -inf among them, and values that differ by the rounding of fp32."""
    x = logits_of(9, 331)
    x[3, 2:] = -torch.inf
    tokens, counts = [0] * 9, [5, 0, 1, 5, 2, 331, 7, 7, 7]
    found = top_logprobs(x, torch.tensor(tokens, dtype=torch.int32), torch.arange(9), max(counts))
    for ours, row, count in zip(scored(tokens, counts, *found), x, counts, strict=True):
        host = token_logprobs(row, 0, count)
        assert [i for i, _ in ours.top] == [i for i, _ in host.top]
        assert [x for _, x in ours.top] == pytest.approx([x for _, x in host.top], abs=1e-5)
        assert ours.logprob == pytest.approx(host.logprob, abs=1e-5)


def test_contract_errors() -> None:
    with pytest.raises(ValueError, match=r"top_logprobs: got logits \(2, 3\) torch.float64"):
        ops.top_logprobs(torch.zeros(2, 3).double(), torch.zeros(2).int(), torch.zeros(1).long(), 1)
    with pytest.raises(ValueError, match=r"tokens \(1,\)"):
        ops.top_logprobs(torch.zeros(2, 3), torch.zeros(1).int(), torch.zeros(1).long(), 1)
