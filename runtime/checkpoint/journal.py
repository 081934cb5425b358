"""The journal of an unfinished conversion: what it is converting, and which of its units are finished.

One JSON object per line. The first is the fingerprint of source and options; every other is a finished unit with the
SHA-256 of what was written for it. The checksum is verified on resuming, so the journal needs no fsync per unit: after
a power cut, units whose bytes did not reach the disk are simply converted again.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from nibblelm.checkpoint.writer import typed_write_errors
from nibblelm.errors import ConvertError

try:
    import fcntl
except ImportError:  # no advisory locks on this system
    fcntl = None

NAME = "journal.jsonl"


class Journal:
    """In a folder that is `locked`; `records` are the units that an earlier run finished, by name."""

    def __init__(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        path = folder / NAME
        with typed_write_errors(path):
            self._file = path.open("a+b", buffering=0)
        self._path = path
        self.records: dict[str, dict[str, Any]] = {}
        try:
            self._read(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, fingerprint: dict[str, Any]) -> None:
        lines, end = parse_lines(self._path)
        os.truncate(self._path, end)  # a torn last line
        if not lines:
            self._append(fingerprint)
            return
        changed = [key for key in fingerprint if lines[0].get(key) != json.loads(json.dumps(fingerprint[key]))]
        if changed:
            raise ConvertError(
                f"{self._path.parent} is from a conversion with other {', '.join(changed)}; resume with the same ones "
                "and an unchanged source, or start again with --overwrite"
            )
        self.records = {line["unit"]: line for line in lines[1:]}

    def _append(self, line: dict[str, Any]) -> None:
        with typed_write_errors(self._path):
            data = json.dumps(line).encode() + b"\n"
            while data:  # unbuffered: a line that does not fit is an error here, not again when the file is closed
                data = data[os.write(self._file.fileno(), data) :]

    def add(self, unit: str, record: dict[str, Any]) -> None:
        """Note a finished unit."""
        self._append({"unit": unit, **record})


def locked(folder: Path) -> BinaryIO:
    """Make `folder`, and hold its journal until the file is closed. Raises ConvertError when a running conversion holds
    it."""
    path = folder / NAME
    while True:
        with typed_write_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = path.open("a+b")
            except FileNotFoundError as cause:
                if path.is_symlink():
                    raise ConvertError(f"{path} is a link to a place that is not there; remove it") from cause
                continue  # another conversion has just ended, and taken the folder away
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            file.close()
            raise ConvertError(f"another conversion is running and writing {folder}; wait for it or stop it") from cause
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()


def parse_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a journal and the byte at which they end; nothing when there is no journal."""
    lines: list[dict[str, Any]] = []
    end = 0
    with typed_write_errors(path):
        data = path.read_bytes() if path.exists() else b""
    for line in data.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, dict):
            break
        lines.append(value)
        end += len(line)
    return lines, end
