"""Programs are captured beside what is under way, and share memory."""

import pytest
import torch

from nibblelm import ops
from nibblelm.ops import cuda

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")


def test_nothing_is_waited_for() -> None:
    x = torch.randn(64, 512, device=DEVICE)
    want, pool = ops.softmax(x), cuda.Pool(DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # clock cycles: about three seconds
    busy = torch.cuda.Event()
    busy.record()
    programs, results = [], []
    for _ in range(3):
        with ops.capture(DEVICE, pool) as program:
            results.append(ops.softmax(x))
        programs.append(program)
    assert not busy.query()
    for program in programs:
        program.replay()
    assert all(torch.equal(result, want) for result in results)


def test_what_programs_leave_behind_is_shared() -> None:
    x, size = torch.randn(4096, 1 << 14, device=DEVICE), 256 << 20
    pool, before = cuda.Pool(DEVICE), torch.cuda.memory_reserved()
    want = ops.softmax(ops.softmax(x))[:, :1].clone()
    torch.cuda.empty_cache()
    programs = []
    for _ in range(4):
        with ops.capture(DEVICE, pool) as program:
            result = ops.softmax(ops.softmax(x))[:, :1].clone()
        programs.append(program)
        program.replay()
        assert torch.equal(result, want)
    assert torch.cuda.memory_reserved() - before < 3 * size


def test_is_not_nested() -> None:
    with (
        ops.capture(DEVICE),
        pytest.raises(RuntimeError, match="a program is being recorded"),
        ops.capture(DEVICE),
    ):
        pass
