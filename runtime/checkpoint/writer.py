"""Writing safetensors files whose shapes are all known beforehand, in any order and in pieces.

Source: the format description at https://huggingface.co/docs/safetensors, and the sharded index of transformers.
"""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblelm.checkpoint.folder import INDEX, SINGLE
from nibblelm.checkpoint.safetensors_file import DTYPES
from nibblelm.errors import ConvertError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class OutputTensor:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """One planned file: its header bytes, where each tensor begins, and its size."""

    name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


def plan_files(units: Sequence[Sequence[OutputTensor]], max_bytes: int) -> list[OutputFile]:
    """Lay tensors out in files of at most `max_bytes` of data, in order; a unit's tensors stay together.

    A unit larger than the limit gets a file of its own. One file is `model.safetensors`, several are
    `model-00001-of-0000N.safetensors`.
    """
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for unit in units:
        size = sum(tensor.nbytes for tensor in unit)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1] += unit
        filled += size
    if len(shards) == 1:
        return [_plan_file(SINGLE, shards[0])]
    return [_plan_file(f"model-{i:05}-of-{len(shards):05}.safetensors", shard) for i, shard in enumerate(shards, 1)]


def _plan_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    # Wide dtypes first: without gaps, that keeps every tensor aligned to its own items.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor in ordered:
        begins[tensor.name], end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[tensor.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    encoded = len(text).to_bytes(8, "little") + text
    offsets = {key: len(encoded) + begin for key, begin in begins.items()}
    return OutputFile(name, encoded, offsets, len(encoded) + end)


def index_json(files: Sequence[OutputFile]) -> dict[str, Any]:
    """The contents of `model.safetensors.index.json`."""
    total = sum(file.nbytes - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


class FolderWriter:
    """The planned files inside a folder, open for writing pieces of tensors anywhere.

    Files that are there already keep their contents (a resumed conversion). Raises ConvertError when the disk is full
    or a file cannot be written.
    """

    def __init__(self, folder: Path, files: Sequence[OutputFile]) -> None:
        self._folder, self._files = folder, files
        self._home = {name: file for file in files for name in file.offsets}
        self._open: dict[str, int] = {}

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self, file: OutputFile) -> int:
        if file.name not in self._open:
            path = self._folder / file.name
            with typed_write_errors(path):
                self._open[file.name] = descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                _write_all(descriptor, memoryview(file.header), 0)
                os.ftruncate(descriptor, file.nbytes)
        return self._open[file.name]

    def write(self, name: str, position: int, data: Tensor) -> memoryview:
        """Write contiguous `data` at byte `position` of tensor `name`; returns the bytes written."""
        file = self._home[name]
        # numpy has no bfloat16, so the bytes are shown to it as such
        view = data.contiguous().view(-1).view(torch.uint8).numpy().data
        with typed_write_errors(self._folder / file.name):
            _write_all(self._descriptor(file), view, file.offsets[name] + position)
        return view

    def read(self, tensor: OutputTensor, piece: int = 1 << 22) -> Iterator[bytes]:
        """What the file holds for a tensor, in pieces; used to verify what an earlier run wrote."""
        file = self._home[tensor.name]
        begin, end = file.offsets[tensor.name], file.offsets[tensor.name] + tensor.nbytes
        for position in range(begin, end, piece):
            yield os.pread(self._descriptor(file), min(piece, end - position), position)

    def finish(self) -> None:
        """Make every file durable and, when there are several, write the index."""
        for file in self._files:
            with typed_write_errors(self._folder / file.name):
                os.fsync(self._descriptor(file))
        self.close()
        if len(self._files) > 1:
            write_json(self._folder / INDEX, index_json(self._files))

    def close(self) -> None:
        """Close the files; unwritten tensors stay as they are."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file durably and in one step: a reader sees all of it or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    with typed_write_errors(path), partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")  # in ASCII: a lone surrogate has no UTF-8
        file.flush()
        os.fsync(file.fileno())
    with typed_write_errors(path):
        partial.replace(path)


@contextmanager
def typed_write_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors into ConvertError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ConvertError(
                f"no space left while writing {path}, or files may not be as large: free some space and run the same "
                "conversion with --resume, which keeps what is finished"
            ) from error
        raise ConvertError(f"cannot write {path}: {error.strerror or error}") from error


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
