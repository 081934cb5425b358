"""End-to-end speed of the engine: prompts, and greedy tokens of a batch.

Rules: every step consumes the tokens the last one wrote, end tokens are ignored, logits are checked finite, the
prompts of a batch differ, depth is filled by real prefill and then found in the cache, prompts are not. A batch is
entered at once and runs twice, to its first tokens and to its last: prefill counts from ids on the host to all first
tokens, decoding is batch * (generated - 1) / (the one's time - the other's), sampling, threads and queues included.
A second of warm-up, then `repeats` measurements of at least `seconds` each.
"""

import hashlib
import random
import statistics
import time
from dataclasses import dataclass

import torch

from nibblelm.engine import STEP_TOKENS
from nibblelm.engine_core import Engine, Handle
from nibblelm.pages import page_count
from nibblelm.request import GenerationOutput, Request
from nibblelm.runner import Runner
from nibblelm.sampling_params import SamplingParams
from nibblelm.scheduler import Scheduler


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


MIXED_CONTEXT = 1024 + 512


@dataclass(frozen=True)
class Mixed:
    """Requests of different lengths, all at once: what they took, and the tokens of their outputs per second."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    output_tok_s: tuple[float, float]


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


def measure(
    runner: Runner, load: Load, pages: int | None = None, repeats: int = 5, seconds: float = 1.0, warmup: float = 1.0
) -> Speed:
    """Measure one configuration with a pool of `pages`, else of as many as the load takes.

    `runner` has a capacity of at least `load.context`, and nothing reserved.
    """
    pages = load.batch * page_count(load.context) if pages is None else pages
    runner.reserve(load.batch + 1, pages + 1)
    engine = Engine(runner, Scheduler(load.batch, pages, STEP_TOKENS[runner.device.type]))
    try:
        return _measured(engine, runner.model.config.vocab_size, load, repeats, seconds, warmup)
    finally:
        engine.close()


def mixed_lengths(requests: int) -> list[tuple[int, int]]:
    """Tokens of the prompt and of the output of each request of the mixed load."""
    draw = random.Random(0)
    return [(draw.randint(64, 1024), draw.randint(64, 512)) for _ in range(requests)]


def measure_mixed(runner: Runner, pages: int | None = None, requests: int = 256, repeats: int = 3) -> Mixed:
    """Prompts of 64 to 1,024 tokens with outputs of 64 to 512, drawn with seed 0, entered at once; after a run that
    does not count. `runner` has a capacity of at least MIXED_CONTEXT, and nothing reserved.
    """
    lengths = mixed_lengths(requests)
    pages = sum(page_count(sum(both)) for both in lengths) if pages is None else pages
    vocab_size, device = runner.model.config.vocab_size, runner.device
    ids = prompts(Load(1024, batch=requests), vocab_size)
    runner.reserve(requests + 1, pages + 1)
    engine = Engine(runner, Scheduler(requests, pages, STEP_TOKENS[device.type]))

    def seconds() -> float:
        begun = time.perf_counter()
        handles: list[Handle] = []
        for tokens, (prompt, output) in zip(ids, lengths, strict=True):
            params = SamplingParams(temperature=0, max_tokens=output)
            request = Request(tokens[:prompt], params, None, vocab_size, MIXED_CONTEXT, set())
            request.share = 0
            handles.append(engine.add(request, stream=False))
        got = sum(len(handle.result().output.token_ids) for handle in handles)
        assert got == sum(output for _, output in lengths)
        return time.perf_counter() - begun

    try:
        seconds()
        total = sum(output for _, output in lengths)
        rates = [total / seconds() for _ in range(repeats)]
    finally:
        engine.close()
    return Mixed(requests, sum(prompt for prompt, _ in lengths), total, _mean_std(rates))


def _measured(engine: Engine, vocab_size: int, load: Load, repeats: int, seconds: float, warmup: float) -> Speed:
    ids = prompts(load, vocab_size)

    def run(tokens: int, length: int | None = None) -> tuple[float, list[list[int]]]:
        """Seconds, and the ids of each output, of `tokens` tokens after each prompt or its beginning."""
        params = SamplingParams(temperature=0, max_tokens=tokens)
        requests = [Request(prompt[:length], params, None, vocab_size, load.context, set()) for prompt in ids]
        begun = time.perf_counter()
        handles = []
        for request in requests:
            request.share = load.depth
            handles.append(engine.add(request, stream=False))
        outputs: list[GenerationOutput] = [handle.result().output for handle in handles]
        spent = time.perf_counter() - begun
        if errors := [output.error for output in outputs if output.error is not None]:
            raise FloatingPointError(errors[0])
        return spent, [output.token_ids for output in outputs]

    if load.depth:
        run(1, load.depth)
    deadline = time.perf_counter() + warmup
    generated = run(load.generated_tokens)[1]
    while time.perf_counter() < deadline:
        run(load.generated_tokens)
    prefill: list[float] = []
    decode: list[float] = []
    for _ in range(repeats):
        first = whole = 0.0
        rounds = 0
        while whole < seconds:
            first += run(1)[0]
            spent, again = run(load.generated_tokens)
            assert again == generated, "greedy output must repeat from run to run"
            whole += spent
            rounds += 1
        prefill.append(rounds * load.batch * load.prompt_tokens / first)
        steps = rounds * load.batch * (load.generated_tokens - 1)
        decode.append(steps / (whole - first) if steps and whole > first else 0.0)
    digest = hashlib.sha256(repr([list(step) for step in zip(*generated, strict=True)]).encode()).hexdigest()[:16]
    return Speed(_mean_std(prefill), _mean_std(decode), digest)


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
