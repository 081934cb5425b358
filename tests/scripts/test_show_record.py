"""scripts/show_record.py on the records that are here, from which README has its tables."""

from collections.abc import Callable
from typing import Any


def test_every_record_has_its_table(script: Callable[..., Any]) -> None:
    result = script("show_record.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(", measured on ") > 10
    assert "| soak |" in result.stdout
