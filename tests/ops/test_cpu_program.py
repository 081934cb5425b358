"""Recorded programs, the thread team and the choice of the instruction set."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nibblelm import _cpu, ops
from nibblelm.ops import QuantizedWeight, cpu

CPU = torch.device("cpu")


def test_replay_equals_the_ops_themselves(make_weight: Callable[..., QuantizedWeight]) -> None:
    """A small layer recorded once and replayed at other ids, positions and pages, with its temporaries out of reach."""
    table, norm = torch.randn(20, 64).bfloat16(), torch.randn(64)
    qkv_weight = ops.pack_linear([make_weight(128, 64, 4, 32)], CPU)
    head = ops.pack_linear([make_weight(331, 64, 8, -1)], CPU)
    angles = torch.randn(30, 8)
    cos, sin = angles.cos(), angles.sin()
    caches = [torch.zeros(3, 2, ops.PAGE, 16) for _ in range(4)]
    tables = torch.tensor([[1]], dtype=torch.int32)
    ids, positions, slots = (torch.zeros(1, dtype=torch.int32) for _ in range(3))

    def step(caches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = ops.embedding(ids, table)
        h, _ = ops.rms_norm(x, norm, 1e-5)
        qkv = ops.linear(h, qkv_weight, None, 8).view(1, 8, 16)
        q = ops.rope_append(qkv, positions, slots, tables, cos, sin, *caches)
        y = ops.attention(q, *caches, slots, positions, tables, 0.25)
        x = ops.linear(y, head)
        return ops.softmax(x), ops.argmax(x)

    with ops.capture(CPU) as program:
        results = step(caches[:2])
    garbage = [torch.full((1, n), 1e9) for n in (64, 128, 331) for _ in range(20)]  # would land in freed memory
    for position, token, page in ((0, 3, 1), (1, 19, 1), (0, 0, 2), (1, 7, 2), (2, 3, 1)):
        ids[0], positions[0], tables[0, 0] = token, position, page
        program.replay()
        expected = step(caches[2:])
        assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))
    assert torch.equal(caches[0], caches[2])
    assert len(garbage) == 60


def test_ops_without_a_kernel_are_recorded_too() -> None:
    x, slopes = torch.randn(1, 2, 3, 8), torch.tensor([0.5, 0.25])
    with ops.capture(CPU) as program:
        before = ops.softmax(x.view(6, 8))
        middle = ops.alibi_mask(before.view(1, 2, 3, 8), slopes)
        after = ops.softmax(middle.view(6, 8))
    x.normal_()
    program.replay()
    assert len(program) == 3
    want = ops.softmax(ops.alibi_mask(ops.softmax(x.view(6, 8)).view(1, 2, 3, 8), slopes).view(6, 8))
    assert torch.equal(after, want)


def test_capture_is_not_nested_and_survives_exceptions() -> None:
    x = torch.randn(2, 8)
    with ops.capture(CPU) as outer, pytest.raises(RuntimeError, match="already"), ops.capture(CPU):
        pass
    with pytest.raises(KeyError), ops.capture(CPU):
        raise KeyError("inside")
    ops.softmax(x)  # recorded by nobody
    assert len(outer) == 0
    with ops.capture(CPU) as program:
        ops.softmax(x)
    assert len(program) == 1


def test_capture_records_only_its_own_thread() -> None:
    x = torch.randn(2, 8)
    with ops.capture(CPU) as program:
        other = threading.Thread(target=lambda: ops.softmax(x))
        other.start()
        other.join()
        ops.softmax(x)
    assert len(program) == 1


def test_replay_reports_ids_out_of_range() -> None:
    ids, table = torch.zeros(1, dtype=torch.int32), torch.randn(4, 8)
    with ops.capture(CPU) as program:
        ops.embedding(ids, table)
    ids[0] = 4
    with pytest.raises(ValueError, match="outside the table"):
        program.replay()


def test_ops_of_several_threads_take_turns(make_weight: Callable[..., QuantizedWeight]) -> None:
    weight = ops.pack_linear([make_weight(331, 400, 4, 32)], CPU)
    inputs = [torch.randn(9, 400) for _ in range(4)]
    expected = [ops.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(ops.linear(inputs[i], weight), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_computes_on_its_own_team() -> None:
    x = torch.randn(64, 9000)
    expected = ops.softmax(x).numpy().tobytes()  # the workers exist now
    child = os.fork()
    if child == 0:  # torch's own threads do not survive a fork: compare without them
        same = ops.softmax(x).numpy().tobytes() == expected
        os._exit(0 if same and _cpu.threads() == _cpu.usable_cores() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_and_instruction_sets_are_settable() -> None:
    assert _cpu.usable_cores() <= len(os.sched_getaffinity(0))
    for count in (1, 3, 2, 100_000, 10**11):  # more than there are cores would only wait for each other
        cpu.set_threads(count)
        assert _cpu.threads() == min(count, _cpu.usable_cores())
    cpu.set_threads(0)
    assert _cpu.threads() == _cpu.usable_cores()
    with pytest.raises(ValueError, match="negative"):
        cpu.set_threads(-1)
    assert _cpu.available_isas()[-1] == "portable"
    with pytest.raises(ValueError, match="sse9"):
        _cpu.set_isa("sse9")


@contextmanager
def pair(threads: int) -> Iterator[Callable[[], float]]:
    """Two processes that replay side by side when called; the mean of their CPU seconds of a replay."""
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(script), str(threads), "0.2"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        both = (first, second)
        assert [process.stdout.readline() for process in both] == ["ready\n"] * 2

        def cpu_per_replay() -> float:
            for process in both:
                process.stdin.write("\n")
                process.stdin.flush()
            return sum(float(process.stdout.readline()) for process in both) / 2

        yield cpu_per_replay


@pytest.mark.skipif(_cpu.usable_cores() < 2, reason="one core: there is no team")
def test_two_processes_do_not_spin_on_each_others_cores() -> None:
    """With default threads a step costs them about what it costs with one thread each, not half as much again: the
    least of each, as other load on the machine only adds, in as many short tries as that load leaves room for."""
    with pair(0) as default, pair(1) as single:
        costs, alone = [default()], [single()]
        while min(costs) >= 1.25 * min(alone) and len(costs) < 200:
            costs.append(default())
            alone.append(single())
    assert min(costs) < 1.25 * min(alone), (costs, alone)  # spinning gave 1.4 to 2.4


def test_workers_wake_up_after_sleeping() -> None:
    """Loops at intervals around the time after which workers sleep: none may hang or lose a piece."""
    x = torch.randn(64, 3000)
    expected = ops.softmax(x)
    pause = threading.Event()
    for i in range(300):
        assert torch.equal(ops.softmax(x), expected)
        pause.wait(i % 7 * 5e-5)


def test_a_program_that_is_gone_records_no_more() -> None:
    program = _cpu.Program()
    program.begin()
    del program
    ops.softmax(torch.randn(2, 8))
    with ops.capture(torch.device("cpu")) as again:
        ops.softmax(torch.randn(2, 8))
    assert len(again) == 1
