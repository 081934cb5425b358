"""Reading the tensors of a source checkpoint in blocks of rows, each checked to be finite."""

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from nibblelm.checkpoint import Checkpoint
from nibblelm.errors import ConvertError

BLOCK_BYTES = 32 << 20


def blocks(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """A tensor in blocks of whole rows, (R, K) or (R, 1), read into one buffer that the next block overwrites.

    Plain reads rather than the memory map: an unreadable sector is then an error instead of a SIGBUS. Raises
    ConvertError, also for a NaN or an infinity.
    """
    info = checkpoint.info(name)
    rows, cols = info.shape if len(info.shape) == 2 else (info.nbytes // info.dtype.itemsize, 1)
    row_bytes = cols * info.dtype.itemsize
    # Zero-points are packed eight (or four) rows to a word, so blocks hold multiples of eight rows.
    step = max(BLOCK_BYTES // max(row_bytes, 1) // 8 * 8, 8)
    buffer = bytearray(min(step, rows) * row_bytes)
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            for row in range(0, rows, step):
                view = memoryview(buffer)[: min(step, rows - row) * row_bytes]
                _read_into(file, view, info.file)
                block = torch.frombuffer(view, dtype=info.dtype).view(-1, cols)
                check_finite(name, row, block)
                yield block
    except OSError as cause:
        raise ConvertError(f"cannot read {name} from {info.file}: {cause.strerror or cause}") from cause


def _read_into(file: FileIO, view: memoryview, path: Path) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise ConvertError(f"{path} ended early: it was changed or cut off while it was read")
        view = view[count:]


def check_finite(name: str, first_row: int, block: Tensor) -> None:
    """Raise ConvertError naming the tensor and its first row with a NaN or an infinity."""
    # The extremes show both without a copy of the block: a NaN is either's result.
    if block.is_floating_point() and block.numel() and not torch.stack(block.aminmax()).isfinite().all():
        row = first_row + next(i for i, values in enumerate(block) if not values.isfinite().all())
        raise ConvertError(
            f"{name}: row {row} holds a NaN or an infinity; only finite weights can be converted. The source is "
            "damaged or its training failed: fetch it again, or take another checkpoint of it"
        )
