"""Numbers of bytes as people write them."""

from nibblelm.errors import ConvertError, NibbleLMError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {unit + end: 2**power for unit, power in (("K", 10), ("M", 20), ("G", 30)) for end in ("", "IB")}


def parse_size(size: int | str, what: str = "max_shard_size", error: type[NibbleLMError] = ConvertError) -> int:
    """Bytes of "4GB" (10^9), "500MiB" or "500M" (2^20), or a plain number; raises `error` for anything else."""
    text = str(size).strip().upper().replace(" ", "")
    digits = text.rstrip("KMGTIB")
    try:
        value = int(float(digits) * _UNITS.get(text[len(digits) :], 0))
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise error(f"{what} must be a positive number of bytes such as 4GB or 500MiB, got {size!r}")
    return value
