"""A record that grows row by row, so that what is measured stays when what follows fails."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Rows:
    """Rows of a JSON file; one that has the same `key` fields as a row before takes its place.

    path   written after every row; None: rows are printed alone
    facts  that every row gets
    """

    def __init__(self, path: Path | None, key: Sequence[str], **facts: Any) -> None:
        self._path, self._key, self._facts = path, key, facts
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.rows = json.loads(path.read_text())

    def add(self, **row: Any) -> dict[str, Any]:
        """Enter a row, show it and write the file."""
        row = {**row, **self._facts}
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "tree"))
        self.rows = [old for old in self.rows if any(old.get(k) != row.get(k) for k in self._key)] + [row]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_text(json.dumps(self.rows, indent=1) + "\n")
            partial.replace(self._path)
        return row
