"""Uploads through the pinned ring: every byte arrives, whatever the device is still busy with."""

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda
from nibblelm.ops.cuda_upload import SLOT, SLOTS, upload

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")
LONG = 200_000_000  # clock cycles: about 0.1 s, longer than anything here is queued for


def filled(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    """Random bits."""
    *rest, last = shape
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*rest, last * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def same_bits(got: Tensor, want: Tensor) -> bool:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.is_contiguous()
    return torch.equal(got.cpu().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 4099, SLOT - 1, SLOT, SLOT + 1, (SLOTS + 2) * SLOT + 17])
def test_sizes_around_a_slot(size: int) -> None:
    source = filled(size)
    assert same_bits(upload([source], DEVICE), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_parts_follow_each_other(dtype: torch.dtype) -> None:
    parts = [filled(rows, 331, dtype=dtype, seed=rows) for rows in (17, 1, 7001, 3)]
    assert same_bits(upload(parts, DEVICE), torch.cat(parts))
    assert same_bits(upload([part.to(DEVICE) for part in parts], DEVICE), torch.cat(parts))


def test_into_memory_that_is_there() -> None:
    source, target = filled(63, 172), torch.zeros(65, 172, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(LONG)
    assert upload([source], DEVICE, out=target[1:64]).data_ptr() == target[1:].data_ptr()
    assert same_bits(target[1:64], source)
    assert not target[[0, 64]].any()
    with pytest.raises(ValueError, match="want the same"):
        upload([source], DEVICE, out=target)


def test_a_view_with_gaps() -> None:
    source = filled(63, 172)[:, 3:100]
    assert same_bits(upload([source], DEVICE), source)


def test_what_is_there_stays_where_it_is() -> None:
    there = filled(17, 3).to(DEVICE)
    assert upload([there], DEVICE).data_ptr() == there.data_ptr()


def test_a_slot_is_not_refilled_before_its_copy_is_done() -> None:
    """The bus waits behind a long kernel while the host comes round the ring, and the source changes at once."""
    upload([filled(1)], DEVICE)
    source = filled((2 * SLOTS + 1) * SLOT)
    want = source.clone()
    torch.cuda._sleep(LONG)
    got = upload([source], DEVICE)
    source.zero_()
    assert same_bits(got, want)


def test_programmatic_launches_wait_for_weights() -> None:
    """Kernels launched so may read a weight before the work ahead of them is done: so none may be under way."""
    stream, weight = torch.cuda.current_stream(), filled(64, 96, dtype=torch.int32).float()
    ops.pack_linear([weight], DEVICE)
    torch.cuda._sleep(LONG)
    ops.pack_linear([weight], DEVICE)
    assert not stream.query()  # called one by one, kernels keep the stream's order
    with cuda.programmatic_launch(True):
        assert stream.query()
        torch.cuda._sleep(LONG)
        ops.pack_linear([weight], DEVICE)
        assert stream.query()
