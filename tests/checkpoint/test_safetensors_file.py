"""The mmap reader against the safetensors library, and header by header what it must refuse."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm.checkpoint import SafetensorsFile
from nibblelm.errors import CheckpointError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (3, 0, 5), (17,), (63, 3), (2, 1, 331), (1, 1, 1, 1)]


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            count = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
            tensors[f"{dtype}{shape}"] = data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    path = tmp_path / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert sorted(file.names()) == sorted(tensors)
    for name, expected in load_file(path).items():
        info, got = file.info(name), file.tensor(name)
        assert (info.dtype, info.shape, info.nbytes) == (expected.dtype, tuple(expected.shape), expected.nbytes)
        assert (got.dtype, got.shape, got.is_contiguous()) == (expected.dtype, expected.shape, True)
        # NaNs among the random bits: compare the bytes
        assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name


def test_rows_release_and_private_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    table = torch.arange(4099 * 17, dtype=torch.float32).view(4099, 17)
    save_file({"scalar": torch.tensor(1.0), "table": table}, path)
    file = SafetensorsFile(path)
    rows = file.rows("table", 63, 331)
    assert torch.equal(rows, table[63:331])
    assert rows.data_ptr() != file.rows("table", 0, 1).data_ptr()
    file.release("table")
    assert torch.equal(rows, table[63:331]), "a released page is read again"
    assert file.rows("table", 5, 5).shape == (0, 17)
    for start, stop in ((-1, 2), (2, 1), (0, 4100)):
        with pytest.raises(CheckpointError, match="no rows"):
            file.rows("table", start, stop)
    with pytest.raises(CheckpointError, match="no rows"):
        file.rows("scalar", 0, 1)
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        file.tensor("absent")
    file.tensor("table").zero_()
    assert torch.equal(SafetensorsFile(path).tensor("table"), table)


def test_tensors_keep_the_mapping_alive(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"t": torch.arange(331)}, path)
    assert torch.equal(SafetensorsFile(path).tensor("t"), torch.arange(331))


def test_reading_is_lazy_and_release_returns_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    save_file({"a": torch.ones(8 << 20), "b": torch.ones(8 << 20)}, path)

    def resident() -> int:
        """Of the file's mappings alone: other memory of this process comes and goes."""
        mapped = Path("/proc/self/smaps").read_text().partition(f" {path}\n")[2]
        return int(mapped.partition("\nRss:")[2].split()[0]) << 10

    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc to see resident memory")
    size = 32 << 20
    file = SafetensorsFile(path)
    assert resident() < size // 4
    for name in ("a", "b"):
        tensor = file.tensor(name)
        assert sum(float(tensor[start : start + 4096].sum()) for start in range(0, 8 << 20, 4096)) == 8 << 20
        assert resident() > size // 2
        file.release(name)
        assert resident() < size // 2


def test_misaligned_data_is_read_into_aligned_memory(tmp_path: Path) -> None:
    values = struct.pack("<3f", 1.0, 2.0, 3.0)
    header = json.dumps({"u": entry([1], 0, 1, "U8"), "f": entry([3], 1, 13)}).encode()
    header += b" " * (-len(header) % 8)
    tensor = SafetensorsFile(write(tmp_path / "m.safetensors", header, b"\7" + values)).tensor("f")
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    assert tensor.data_ptr() % 4 == 0


HUGE = 1 << 62
REFUSED: dict[str, Callable[[Path], object]] = {
    "bytes and is not a safetensors": lambda p: p.write_bytes(b"\2\0\0\0\0\0\0\0{"),
    "claims a header of 18446744073709551615": lambda p: write(p, {}, length=2**64 - 1),
    "claims a header of 3": lambda p: write(p, b"{}", length=3),
    "not valid JSON": lambda p: write(p, b"{]"),
    "codec can't decode": lambda p: write(p, b'{"\xff": 1}'),
    "JSON list": lambda p: write(p, b"[]"),
    "too deeply": lambda p: write(p, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "'a' is given twice": lambda p: write(p, b'{"a":{},"a":{}}'),
    "'shape' is given twice": lambda p: write(p, b'{"a":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}}'),
    "__metadata__ is not": lambda p: write(p, {"__metadata__": {"a": 1}}),
    "__metadata__ is": lambda p: write(p, {"__metadata__": []}),
    "exactly dtype, shape": lambda p: write(p, {"a": {"dtype": "F32", "shape": [0]}}),
    "exactly dtype": lambda p: write(p, {"a": [1]}),
    "'F8_E4M3' is not supported; supported: BF16": lambda p: write(p, {"a": entry([0], 0, 0, "F8_E4M3")}),
    r"dtype \['F32'\]": lambda p: write(p, {"a": entry([0], 0, 0, ["F32"])}),
    r"shape \[-1\]": lambda p: write(p, {"a": entry([-1], 0, 0)}),
    r"shape \[True\]": lambda p: write(p, {"a": entry([True], 0, 4)}, b"1234"),
    r"shape \[1.0\]": lambda p: write(p, {"a": entry([1.0], 0, 4)}, b"1234"),
    "shape 4": lambda p: write(p, {"a": entry(4, 0, 4)}, b"1234"),
    r"at most 8 sizes": lambda p: write(p, {"a": entry([1] * 9, 0, 4)}, b"1234"),
    "too large": lambda p: write(p, {"a": entry([HUGE, 4], 0, 0)}),
    f"{HUGE}, 0, 4] is too large": lambda p: write(p, {"a": entry([HUGE, 0, 4], 0, 0)}),
    "hold 8 bytes": lambda p: write(p, {"a": entry([3], 0, 8)}, bytes(8)),
    "hold -4 bytes": lambda p: write(p, {"a": entry([1], 4, 0)}, bytes(4)),
    "not two byte positions": lambda p: write(p, {"a": entry([1], -4, 0)}, bytes(4)),
    "two byte positions": lambda p: write(p, {"a": {**entry([1], 0, 4), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "overlap or leave a gap": lambda p: write(p, {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "leave a gap": lambda p: write(p, {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "byte [0-9]+ is due": lambda p: write(p, {"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
    "cut off or was appended": lambda p: write(p, {"a": entry([2], 0, 8)}, bytes(7)),
    "appended": lambda p: write(p, {"a": entry([2], 0, 8)}, bytes(9)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    REFUSED[message](path)
    pattern = message if message != f"{HUGE}, 0, 4] is too large" else "0, 4. is too large"
    with pytest.raises(CheckpointError, match=pattern):
        SafetensorsFile(path)


def test_refuses_what_is_not_a_plain_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="not a plain file"):
            SafetensorsFile(path)


def test_refuses_a_header_beyond_the_json_limit_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)  # sparse
    with pytest.raises(CheckpointError, match="claims a header of 1073741824"):
        SafetensorsFile(path)


def test_real_checkpoints(data_dir: Path) -> None:
    for path in sorted(data_dir.glob("checkpoints/*/*.safetensors")):
        file = SafetensorsFile(path)
        expected = load_file(path)
        assert sorted(file.names()) == sorted(expected)
        assert all(torch.equal(file.tensor(name), expected[name]) for name in expected)
