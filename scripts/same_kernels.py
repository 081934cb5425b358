"""Which kernels of one build of the CUDA extension another has too, instruction for instruction.

    python scripts/same_kernels.py OLD/_cuda*.so NEW/_cuda*.so

For a record whose csrc has changed since: what a kernel with the same machine code was measured at still holds. Names
do not count, only instructions with their operands. Needs cuobjdump and nvdisasm of the CUDA toolkit, and no card.
Exits with 1 where a kernel of the old build has no equal in the new one, and names it.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

FUNCTION = re.compile(r"\bFunction : (\S+)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")


def kernels(library: Path) -> dict[str, str]:
    """By kernel and architecture, a hash of its machine code."""
    hashes = {}
    architecture, code = "", hashlib.sha256()
    with subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("arch = "):
                architecture = line.split()[-1]
            elif found := FUNCTION.search(line):
                code = hashes[f"{found[1]} {architecture}"] = hashlib.sha256(architecture.encode())
            elif found := INSTRUCTION.search(line):
                code.update(found[1].strip().encode() + b"\n")
    if process.returncode != 0 or not hashes:
        raise SystemExit(f"same_kernels.py: cuobjdump finds no kernels in {library}")
    return {name: code.hexdigest() for name, code in hashes.items()}


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit("usage: same_kernels.py OLD NEW")
    old, new = map(kernels, map(Path, sys.argv[1:]))
    same = set(old.values()) & set(new.values())
    lost = [name for name, code in old.items() if code not in same]
    added = [name for name, code in new.items() if code not in same]
    print(f"{len(old) - len(lost)} of {len(old)} kernels have an equal; {len(added)} of {len(new)} are new")
    for kind, names in (("lost", lost), ("new", added)):
        print("".join(f"{kind}: {name}\n" for name in sorted(names)), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
