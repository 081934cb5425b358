"""A plugin of pytest: which of this project's kernels each test launches on the card, and for how long.

    KERNELS_OF_CASES=FILE PYTHONPATH=scripts python -m pytest -p kernels_of_cases ...

Appends to FILE, for every test that passes, a line of JSON: `case`, pytest's name of it, and `kernels`, nanoseconds by
the kernel's name with the arguments of its template: an instantiation each.
"""

import json
import os
from collections import Counter
from collections.abc import Generator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    card = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if card else ProfilerActivity.CPU]) as seen:
        result = yield
        if card:
            torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    assert seen.profiler
    assert seen.profiler.kineto_results  # whose events are there at once, where `seen.events()` is slow
    for event in seen.profiler.kineto_results.events():
        if event.device_type().name == "CUDA" and "nibblelm" in event.name():
            kernels[event.name()] += event.duration_ns()
    line = json.dumps({"case": item.nodeid, "kernels": kernels}) + "\n"
    file = os.open(os.environ["KERNELS_OF_CASES"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.write(file, line.encode())  # in one piece, beside other processes
    os.close(file)
    return result
