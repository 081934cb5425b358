"""One safetensors file, memory-mapped, after strict validation of its header.

Source: the format description at https://huggingface.co/docs/safetensors. A file is an 8-byte little-endian header
length, a JSON object `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, and the tensors' bytes without gaps.
"""

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblelm.checkpoint.json_object import JSON_LIMIT, parse_object, shown
from nibblelm.errors import CheckpointError

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_RANK = 8
_MAX_ELEMENTS = 1 << 60  # times the largest item size this still fits the 64-bit sizes and strides of a tensor
# A private writable mapping keeps torch from warning about read-only memory, and a stray write out of the file.
# Without NORESERVE Linux counts it against free memory and refuses files larger than that; Python has no name for it.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `offset` is its first byte in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int too


def _tensor_info(name: str, entry: Any, file: Path, data_start: int) -> TensorInfo:
    where = f"tensor {shown(name)} in {file}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header needs exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where}: dtype {shown(entry['dtype'])} is not supported; supported: {', '.join(DTYPES)}"
        )
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape {shown(shape)} is not a list of at most {_MAX_RANK} sizes")
    elements, bound = 1, 1
    for size in shape:
        elements, bound = elements * size, bound * max(size, 1)
        if bound > _MAX_ELEMENTS:
            raise CheckpointError(f"{where}: shape {shown(shape)} is too large")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {shown(offsets)} are not two byte positions")
    begin, end = offsets
    if end - begin != elements * dtype.itemsize:
        raise CheckpointError(
            f"{where}: data_offsets {shown(offsets)} hold {shown(end - begin)} bytes, "
            f"shape {shape} of {entry['dtype']} needs {elements * dtype.itemsize}"
        )
    return TensorInfo(name, dtype, tuple(shape), end - begin, file, data_start + begin)


def _parse_header(buffer: mmap.mmap, file: Path) -> dict[str, TensorInfo]:
    length = int.from_bytes(buffer[:8], "little")
    if buffer[:20] == b"version https://git-":
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the file; fetch it (git lfs pull)")
    if length > min(len(buffer) - 8, JSON_LIMIT):
        raise CheckpointError(
            f"{file} has {len(buffer)} bytes and claims a header of {length}; it is cut off, damaged or not safetensors"
        )
    data_start = 8 + length
    header = parse_object(buffer[8:data_start], f"the header of {file}", CheckpointError)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"the header of {file}: __metadata__ is not a map of strings")
    infos = {name: _tensor_info(name, entry, file, data_start) for name, entry in header.items()}
    position = data_start
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            raise CheckpointError(
                f"tensor {shown(info.name)} in {file} begins at byte {info.offset}, where byte {position} is due: "
                "tensors overlap or leave a gap"
            )
        position += info.nbytes
    if position != len(buffer):
        raise CheckpointError(
            f"{file} has {len(buffer)} bytes, its header describes {position}: it is cut off or was appended to"
        )
    return infos


class SafetensorsFile:
    """A validated safetensors file; tensors are views of its memory mapping and keep it alive.

    Pages are read when touched, and `release` gives them back. Everything raises CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if not self.path.is_file():  # opening a pipe would wait for ever
                raise CheckpointError(f"{self.path} is missing or not a plain file")
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 10:  # a header length and "{}"
                    raise CheckpointError(f"{self.path} has {size} bytes and is not a safetensors file")
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                self._buffer = mmap.mmap(file.fileno(), size, flags=_FLAGS, prot=prot)
        except OSError as cause:
            raise CheckpointError(f"cannot read {self.path}: {cause.strerror or cause}") from cause
        self.infos = _parse_header(self._buffer, self.path)

    def names(self) -> list[str]:
        """Tensor names in the order of the header."""
        return list(self.infos)

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor."""
        if name not in self.infos:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}")
        return self.infos[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor, without copying; writing to it changes neither the file nor another mapping of it."""
        info = self.info(name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        data = torch.frombuffer(self._buffer, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        if info.offset % info.dtype.itemsize:
            data = data.clone()  # kernels may use aligned loads
        return data.view(info.dtype).view(info.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor's first dimension, without copying."""
        tensor = self.tensor(name)
        if tensor.ndim == 0 or not 0 <= start <= stop <= tensor.shape[0]:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} of {tuple(tensor.shape)} has no rows {start}:{stop}"
            )
        return tensor[start:stop]

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages; a later access reads them from the file again."""
        info = self.info(name)
        start = info.offset - info.offset % mmap.PAGESIZE
        if info.nbytes and hasattr(self._buffer, "madvise"):
            self._buffer.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)
