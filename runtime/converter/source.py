"""Reading the tensors of a source checkpoint: in blocks of rows, all finite, and the same bytes from first to last."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from nibblelm.checkpoint import Checkpoint
from nibblelm.checkpoint.json_object import listed
from nibblelm.checkpoint.safetensors_file import TensorInfo
from nibblelm.errors import ConvertError

BLOCK_BYTES = 32 << 20


def blocks(checkpoint: Checkpoint, name: str, digest: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor in blocks of whole rows, (R, K) or (R, 1), read into one buffer that the next block overwrites.

    `digest`, a hash object of hashlib, takes every byte that was read; `dtype` is that of the blocks.
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
                digest.update(view)
                block = torch.frombuffer(view, dtype=info.dtype).view(-1, cols)
                check_finite(name, row, block)
                if dtype != info.dtype:
                    block = block.to(dtype)
                    check_finite(f"{name} in {dtype}", row, block)
                yield block
    except OSError as cause:
        raise ConvertError(f"cannot read {name} from {info.file}: {cause.strerror or cause}") from cause


def whole(checkpoint: Checkpoint, name: str, digest: Any, dtype: torch.dtype) -> Tensor:
    """A tensor, read as `blocks` reads it."""
    result, first = torch.empty(checkpoint.info(name).shape, dtype=dtype), 0
    rows = result if result.dim() == 2 else result.view(-1, 1)
    for block in blocks(checkpoint, name, digest, dtype):
        rows[first : first + len(block)] = block
        first += len(block)
    return result


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
            "damaged or its training failed (fetch it again, or take another checkpoint), or they do not fit the dtype"
        )


class SourceHashes:
    """SHA-256 of every weight file and every tensor, in a thread of its own beside the conversion.

    What was converted, now or before an interruption, is compared with it by tensor: size and time of a file can
    stay the same when its bytes change.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._infos: dict[Path, list[TensorInfo]] = {}
        for info in sorted(checkpoint.all_infos(), key=lambda info: (info.file.name, info.offset)):
            self._infos.setdefault(info.file, []).append(info)
        self._stop = Event()
        self._tensors: dict[str, str] = {}

    def __enter__(self) -> "SourceHashes":
        self._pool = ThreadPoolExecutor(1)
        self._found: list[Future[dict[str, Any]]] = [
            self._pool.submit(self._hash, path, infos) for path, infos in self._infos.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _hash(self, path: Path, infos: list[TensorInfo]) -> dict[str, Any]:
        whole = hashlib.sha256()
        with path.open("rb") as file:
            whole.update(file.read(infos[0].offset))
            for info in infos:  # without gaps, as the reader of the header made sure
                tensor, left = hashlib.sha256(), info.nbytes
                while not self._stop.is_set() and (piece := file.read(min(left, 1 << 20))):
                    whole.update(piece)
                    tensor.update(piece)
                    left -= len(piece)
                self._tensors[info.name] = tensor.hexdigest()
        return {"bytes": path.stat().st_size, "sha256": whole.hexdigest()}

    def files(self, read: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
        """File name -> {"bytes", "sha256"}, once all of `read`, (tensor, SHA-256), was found to be in the files."""
        try:
            files = {path.name: future.result() for path, future in zip(self._infos, self._found, strict=True)}
        except OSError as cause:
            raise ConvertError(f"cannot read {cause.filename}: {cause.strerror or cause}") from cause
        changed = [name for name, sha256 in read if self._tensors[name] != sha256]
        if changed:
            raise ConvertError(
                f"the source changed while it was converted, or since the conversion that is resumed: "
                f"{listed(changed)} hold other bytes now than were read; start again with --overwrite"
            )
        return files
