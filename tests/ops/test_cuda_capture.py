"""Programs share memory, and are captured beside what else goes on."""

import pytest
import torch

from nibblelm import ops
from nibblelm.ops import cuda

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")


def test_garbage_ends_no_capture() -> None:
    """A cycle with a program and its pinned input, which would be collected in the middle of the next one's capture;
    and a program whose name the next one takes."""
    x, pool = torch.randn(64, 512), cuda.Pool(DEVICE)
    want = ops.softmax(x.to(DEVICE))
    for _ in range(3):
        staged = x.pin_memory()
        with ops.capture(DEVICE, pool) as program:
            ops.softmax(staged.to(DEVICE, non_blocking=True))
        cycle: list[object] = [program, staged]
        cycle.append(cycle)
        del program, staged, cycle
        kept = x.pin_memory()
        with ops.capture(DEVICE, pool) as other:
            objects = [[i] for i in range(100_000)]  # enough for Python to collect, where it may
            result = ops.softmax(kept.to(DEVICE, non_blocking=True))
        del objects
        assert x.pin_memory().is_pinned()  # torch looks after what was freed
        other.replay()
        assert torch.equal(result, want)


@pytest.mark.sanitize
def test_each_replay_reads_pinned_memory_anew() -> None:
    source = torch.zeros(5000, dtype=torch.int32).pin_memory()
    first = cuda.read_pinned(torch.empty(5000, dtype=torch.int32, device=DEVICE), source)
    torch.cuda.synchronize()  # the source is written again
    with ops.capture(DEVICE) as program:
        got = cuda.read_pinned(torch.empty(5000, dtype=torch.int32, device=DEVICE), source)
    for seed in range(5):
        source.copy_(torch.randint(-(1 << 31), 1 << 31, (5000,), generator=torch.Generator().manual_seed(seed)))
        program.replay()
        torch.cuda.synchronize()
        assert torch.equal(got.cpu(), source)
    assert not first.any()
    for out, x in ((first, source[::2]), (first, torch.zeros(5000, dtype=torch.int32)), (first.float(), source)):
        with pytest.raises(ValueError, match="read_pinned: got"):
            cuda.read_pinned(out, x)


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
