"""A record that grows row by row, so that what is measured stays when what follows fails."""

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Rows:
    """Rows of a JSON file; one that has the same `key` fields as a row before takes its place.

    path   written after every row, also by several processes at a time; None: rows are printed alone
    facts  that every row gets
    """

    def __init__(self, path: Path | None, key: Sequence[str], **facts: Any) -> None:
        self._path, self._key, self._facts = path, key, facts

    def add(self, **row: Any) -> dict[str, Any]:
        """Enter a row, show it and write the file."""
        row = {**row, **self._facts}
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "tree"))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                before = json.loads(file.read() or "[]")
                kept = [old for old in before if any(old.get(k) != row.get(k) for k in self._key)]
                file.truncate(0)
                file.write(json.dumps([*kept, row], indent=1) + "\n")
        return row
