"""Build one wheel with the CPU and the CUDA extension, try it where nothing can be compiled, and record it.

`make wheel` runs this: the wheel goes to dist/, the record to benchmarks/wheel.json. What an earlier run compiled in
build/wheel is kept, and then the record's times are of the rest: remove the folder first.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "wheel.json"


def main() -> None:
    fresh = not (ROOT / "build" / "wheel").exists()
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    started = time.monotonic()
    options = ("--config-settings=cmake.define.NIBBLELM_CUDA=ON", "--config-settings=build-dir=build/wheel")
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".", *options)
    subprocess.run(command, cwd=ROOT, check=True)
    wall, cpu = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    subprocess.run((ROOT / "scripts" / "wheel_demo.sh", wheel), check=True)
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    extensions = {name: next(n for n in sizes if re.match(rf"nibblelm/_{name}\.", n)) for name in ("cpu", "cuda")}
    cache = (ROOT / "build" / "wheel" / "CMakeCache.txt").read_text()
    architectures = re.search(r"^NIBBLELM_CUDA_ARCHS:STRING=(.*)$", cache, re.MULTILINE)
    record = {
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "installed_bytes": sum(sizes.values()),
        **{f"{name}_bytes": sizes[path] for name, path in extensions.items()},
        "architectures": architectures[1] if architectures else None,
        "from_scratch": fresh,
        "build_seconds": round(wall),
        "build_cpu_seconds": round(cpu.ru_utime + cpu.ru_stime),
        "demo": "run without compilers",
        "csrc": subprocess.run(
            ("git", "rev-parse", "HEAD:csrc"), cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
