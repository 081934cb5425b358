"""End-to-end speed: prefill and greedy decode of a loaded model, and the bandwidth it reaches.

Rules: every step consumes the tokens the last one wrote, end tokens are ignored, logits are checked finite, the
prompts of a batch differ, depth is filled by real prefill. Decode speed is batch * (generated - 1) / (first decode
launch to last token on the host), sampling included; prefill counts from ids on the host to the first token, head on
the last position only. Two seconds of warm-up, then `repeats` measurements of at least `seconds` each.
"""

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import SamplingState
from nibblelm.runner import Runner


@dataclass(frozen=True)
class Load:
    """What is measured, in tokens and sequences."""

    prompt_tokens: int = 512
    generated_tokens: int = 128
    batch: int = 1
    depth: int = 0

    @property
    def context(self) -> int:
        """Positions that one sequence needs."""
        return self.depth + self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True)
class Speed:
    """Tokens per second (mean, standard deviation), and a hash of the generated ids."""

    prefill_tok_s: tuple[float, float]
    decode_tok_s: tuple[float, float]
    ids_hash: str


def prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Random prompts of depth + prompt_tokens ids, different for each sequence of the batch."""
    generator = torch.Generator().manual_seed(1)
    length = load.depth + load.prompt_tokens
    return torch.randint(0, vocab_size, (load.batch, length), generator=generator).tolist()


@torch.inference_mode()
def measure(runner: Runner, load: Load, repeats: int = 5, seconds: float = 2.0, warmup: float = 2.0) -> Speed:
    """Measure one configuration; the runner needs room for `load.context` positions."""
    runner.reserve(load.batch)
    ids = prompts(load, runner.model.config.vocab_size)
    slots = list(range(load.batch))
    for slot in slots if load.depth else []:
        runner.prefill(ids[slot][: load.depth], slot)
    deadline = time.perf_counter() + warmup
    generated = _run(runner, ids, slots, load)[2]
    while time.perf_counter() < deadline:
        _run(runner, ids, slots, load)
    prefill: list[float] = []
    decode: list[float] = []
    for _ in range(repeats):
        spent = [0.0, 0.0]
        rounds = 0
        while sum(spent) < seconds:
            a, b, again = _run(runner, ids, slots, load)
            assert again == generated, "greedy output must repeat from run to run"
            spent[0] += a
            spent[1] += b
            rounds += 1
        prefill.append(rounds * load.batch * load.prompt_tokens / spent[0])
        decode.append(
            rounds * load.batch * (load.generated_tokens - 1) / spent[1] if load.generated_tokens > 1 else 0.0
        )
    digest = hashlib.sha256(repr(generated).encode()).hexdigest()[:16]
    return Speed(_mean_std(prefill), _mean_std(decode), digest)


def _run(
    runner: Runner, ids: Sequence[list[int]], slots: list[int], load: Load
) -> tuple[float, float, list[list[int]]]:
    """One prefill of every sequence and one decode: seconds of each and the generated ids."""
    begun = time.perf_counter()
    tokens: list[int] = []
    for slot in slots:
        tokens += _next(runner.prefill(ids[slot], slot, load.depth))
    first = time.perf_counter()
    generated, steps = [tokens], load.generated_tokens - 1
    if runner.device.type == "cuda":
        state = SamplingState.greedy(load.batch, torch.device("cpu"))
        sampled = runner.sampled_steps(tokens, slots, state)
        generated += [sampled.next(last=i == steps - 1) for i in range(steps)]
    else:
        for _ in range(steps):
            generated.append(_next(runner.decode(generated[-1], slots)))
    spent = first - begun, time.perf_counter() - first
    if min(min(tokens) for tokens in generated) < 0:  # what sampling gives for a row without a finite logit
        raise FloatingPointError("a step's logits are not finite")
    return *spent, generated


def _next(logits: Tensor) -> list[int]:
    chosen: list[int] = ops.argmax(logits).tolist()
    if not logits[0, chosen[0]].isfinite():
        raise FloatingPointError(f"the largest logit is {logits[0, chosen[0]].item()}")
    return chosen


def _mean_std(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads from memory: the best of many passes over a buffer too large to cache."""
    passes = 8 if device.type == "cuda" else 1  # between two waits for a GPU, so that the waiting does not count
    buffer = torch.ones(passes << 27, dtype=torch.float32, device=device)

    def once() -> float:
        begun = time.perf_counter()
        for _ in range(passes):
            total = buffer.sum()
        total.item()
        return time.perf_counter() - begun

    return passes * buffer.nbytes / min(once() for _ in range(12))
