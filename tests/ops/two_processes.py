"""Run by test_cpu_program.py: replays a small decode step for a while beside others; prints CPU seconds per replay.

    python two_processes.py THREADS SECONDS

THREADS 0 is the default. Does so for each line that comes in.
"""

import sys
import time

import torch

from nibblelm import ops
from nibblelm.ops import cpu
from nibblelm.random_weights import RandomWeights

CPU = torch.device("cpu")


def main() -> None:
    cpu.set_threads(int(sys.argv[1]))
    weights = RandomWeights(CPU, torch.float32, 8, 4, -1)
    layers = [weights.matrices([("m", 1024)], 1024)[0] for _ in range(8)]
    norm, y = torch.ones(1024), torch.randn(1, 1024)
    with ops.capture(CPU) as program:
        for i in range(96):
            y, _ = ops.rms_norm(y, norm, 1e-5)
            y = ops.linear(y, layers[i % len(layers)], None, 8)
    program.replay()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, used, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < float(sys.argv[2]):
            program.replay()
            count += 1
        print((time.process_time() - used) / count, flush=True)


if __name__ == "__main__":
    main()
