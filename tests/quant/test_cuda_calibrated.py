"""Quantization that computes on the GPU: the CPU's losses, the same bytes after an interruption, the CPU's codes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from nibblelm import convert, ops, random_weights
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant import gptq
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import quantize_rows

USABLE, REASON = ops.cuda_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"


@pytest.fixture(scope="module")
def demo() -> Path:
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    return DEMO


@pytest.mark.parametrize(("bits", "group"), [(4, -1), (4, 32), (8, -1)])
def test_gptq_loses_what_it_loses_on_the_cpu(bits, group) -> None:
    """In float64, of e H e^T: rounding may go the other way at a tie, which the sum hardly sees."""
    torch.manual_seed(0)
    weight = torch.randn(130, 256)
    x = torch.randn(900, 256) @ (torch.randn(256, 256) * torch.logspace(0, -1.5, 256))
    moment = x.T @ x / len(x)

    def loss(device: str) -> float:
        rows = gptq.quantize(weight, moment.to(device), bits, group, False, torch.bfloat16)
        assert {getattr(rows, field.name).device.type for field in dataclasses.fields(rows)} == {"cpu"}
        stored = QuantizedWeight(rows.codes, rows.scale, pack_zero_point(rows.zero, bits), bits, group, (130, 256))
        moved = (stored.codes.to(device), stored.scale.to(device), pack_zero_point(rows.zero, bits).to(device))
        there = dataclasses.replace(stored, codes=moved[0], scale=moved[1], zero_point=moved[2])
        assert torch.equal(dequantize(there).cpu(), dequantize(stored)), "the same matrix, wherever it is restored"
        error = (dequantize(stored) - weight).double().numpy()
        assert np.allclose(rows.squared_error.numpy(), (error**2).sum(1), rtol=1e-6)
        return float(((error @ moment.double().numpy()) * error).sum())

    assert loss("cuda") == pytest.approx(loss("cpu"), rel=0.02)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_folder_made_on_the_gpu(method, demo, tmp_path) -> None:
    options = dict(method=method, samples=8, bits=4, group_size=-1, threads=1)  # other processes test beside this one
    made = {device: convert(demo, tmp_path / device, device=device, **options) for device in ("cuda", "cpu")}
    pairs = zip(made["cuda"].tensors, made["cpu"].tensors, strict=True)
    assert all(a.relative_error == pytest.approx(b.relative_error, rel=0.05) for a, b in pairs)
    for after in (5, 40):
        blocks = iter(range(after))
        with pytest.raises(StopIteration):
            convert(demo, tmp_path / f"{after}", device="cuda", progress=lambda *_, left=blocks: next(left), **options)
        assert convert(demo, tmp_path / f"{after}", device="cuda", resume=True, **options).reused_tensors
        whole, again = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("cuda", f"{after}"))
        assert again == whole


@pytest.mark.parametrize(("bits", "group"), [(4, -1), (4, 128), (8, -1), (8, 128)])
@pytest.mark.parametrize(("rows", "columns"), [(1301, 640), (33, 4096), (70, 1001)])
def test_random_weights_are_those_of_the_cpu(rows, columns, bits, group, monkeypatch) -> None:
    """In blocks, of which the last is smaller."""
    monkeypatch.setattr(random_weights, "_BLOCK", 32 * columns)
    weights = random_weights.RandomWeights(torch.device("cuda"), torch.bfloat16, 16, bits, group)
    state = weights._generator.get_state()
    got = weights._weight(rows, columns, bits, group)
    weights._generator.set_state(state)
    want = quantize_rows(weights._gaussian(rows, columns).cpu(), bits, group, False, "minmax", 2)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scale.cpu(), want.scale)
    assert torch.equal(got.zero_point.cpu(), pack_zero_point(want.zero, bits))
