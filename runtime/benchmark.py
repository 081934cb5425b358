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
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nibblelm.engine import STEP_TOKENS
from nibblelm.engine_core import Engine, Handle
from nibblelm.ops.devices import kernels
from nibblelm.pages import page_count
from nibblelm.request import GenerationOutput, Request
from nibblelm.runner import Runner
from nibblelm.sampling_params import SamplingParams
from nibblelm.scheduler import Scheduler
from nibblelm.speculation import STEP_COST, PromptLookup, Speculation


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


@dataclass(frozen=True)
class Drafts:
    """Decoded tokens per second without and with drafts (mean, standard deviation), in runs that took turns, and the
    ratio of neighbours (median, least, most); how many drafts there were, and a hash of the ids, which are the same."""

    without: tuple[float, float]
    with_drafts: tuple[float, float]
    ratio: tuple[float, float, float]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    ids_hash: str


class Replay:
    """Drafts looked up in an earlier run's prompt and output, with tokens made wrong at random: a share `right` is left
    as it was."""

    def __init__(self, text: list[int], right: float, vocab_size: int) -> None:
        draw = random.Random(0)
        self._lookup, self._text, self._vocab_size = PromptLookup(), text, vocab_size
        self._wrong = [draw.random() >= right for _ in text]

    def draft(self, ids: list[int], most: int) -> list[int]:
        found = self._lookup.draft(self._text + ids, most)
        wrong = self._wrong[len(ids) :]
        return [(token + no) % self._vocab_size for token, no in zip(found, wrong, strict=False)]


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
    engine = Engine(runner, Scheduler(load.batch, pages, STEP_TOKENS[runner.device.type], runner.model.config.window))
    try:
        runs = _Runs(engine, runner.model.config.vocab_size, load)
        runs.warm_up(warmup)
        prefill, decode = zip(*(runs.rates(seconds) for _ in range(repeats)), strict=True)
        return Speed(_mean_std(prefill), _mean_std(decode), runs.ids_hash)
    finally:
        engine.close()


def mixed_lengths(requests: int) -> list[tuple[int, int]]:
    """Tokens of the prompt and of the output of each request of the mixed load."""
    draw = random.Random(0)
    return [(draw.randint(64, 1024), draw.randint(64, 512)) for _ in range(requests)]


def measure_drafts(
    runner: Runner,
    load: Load,
    right: float,
    pages: int | None = None,
    repeats: int = 5,
    seconds: float = 1.0,
    warmup: float = 1.0,
) -> Drafts:
    """`measure` without drafts and with those of a Replay of each sequence's own text, by turns."""
    pages = load.batch * page_count(load.context) if pages is None else pages
    runner.reserve(load.batch + 1, pages + 1)
    vocab_size, device = runner.model.config.vocab_size, runner.device.type
    texts: dict[tuple[int, ...], list[int]] = {}
    costs = STEP_COST[kernels(runner.device)]
    speculation = Speculation(lambda prompt: Replay(texts[tuple(prompt)], right, vocab_size), costs)
    scheduler = Scheduler(load.batch, pages, STEP_TOKENS[device], runner.model.config.window)
    engine = Engine(runner, scheduler, speculation=speculation)
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        speculation.on = False
        runs = _Runs(engine, vocab_size, load)
        texts |= {tuple(prompt): prompt + ids for prompt, ids in zip(runs.prompts, runs.generated, strict=True)}
        for speculation.on in rates:
            runs.warm_up(warmup)
        for _ in range(repeats):
            for speculation.on, measured in rates.items():
                measured.append(runs.rates(seconds)[1])
    finally:
        engine.close()
    pairs = zip(*rates.values(), strict=True)
    ratios = [with_drafts / without for without, with_drafts in pairs if without] or [0.0]  # too short to be measured
    ratio = statistics.median(ratios), min(ratios), max(ratios)
    counts = engine.stats
    counted = (counts.drafts, counts.draft_tokens, counts.accepted_tokens)
    return Drafts(_mean_std(rates[False]), _mean_std(rates[True]), ratio, *counted, runs.ids_hash)


def measure_mixed(runner: Runner, pages: int | None = None, requests: int = 256, repeats: int = 3) -> Mixed:
    """Prompts of 64 to 1,024 tokens with outputs of 64 to 512, drawn with seed 0, entered at once; after a run that
    does not count. `runner` has a capacity of at least MIXED_CONTEXT, and nothing reserved.
    """
    lengths = mixed_lengths(requests)
    pages = sum(page_count(sum(both)) for both in lengths) if pages is None else pages
    vocab_size, device = runner.model.config.vocab_size, runner.device
    ids = prompts(Load(1024, batch=requests), vocab_size)
    runner.reserve(requests + 1, pages + 1)
    engine = Engine(runner, Scheduler(requests, pages, STEP_TOKENS[device.type], runner.model.config.window))

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


class _Runs:
    """Runs of one load, all of which must give the same ids. What its depth needs is in the cache from the first on."""

    def __init__(self, engine: Engine, vocab_size: int, load: Load) -> None:
        self._engine, self._vocab_size, self._load = engine, vocab_size, load
        self.prompts = prompts(load, vocab_size)
        if load.depth:
            self.run(1, load.depth)
        self.generated = self.run(load.generated_tokens)[1]

    def run(self, tokens: int, length: int | None = None) -> tuple[float, list[list[int]]]:
        """Seconds, and the ids of each output, of `tokens` tokens after each prompt or its beginning."""
        params = SamplingParams(temperature=0, max_tokens=tokens)
        requests = [
            Request(prompt[:length], params, None, self._vocab_size, self._load.context, set())
            for prompt in self.prompts
        ]
        begun = time.perf_counter()
        handles = []
        for request in requests:
            request.share = self._load.depth
            handles.append(self._engine.add(request, stream=False))
        outputs: list[GenerationOutput] = [handle.result().output for handle in handles]
        spent = time.perf_counter() - begun
        if errors := [output.error for output in outputs if output.error is not None]:
            raise FloatingPointError(errors[0])
        return spent, [output.token_ids for output in outputs]

    def warm_up(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self.run(self._load.generated_tokens)

    def rates(self, seconds: float) -> tuple[float, float]:
        """Tokens per second of prefill and of decoding, over runs of at least `seconds`."""
        load, first, whole, rounds = self._load, 0.0, 0.0, 0
        while whole < seconds:
            first += self.run(1)[0]
            spent, again = self.run(load.generated_tokens)
            assert again == self.generated, "greedy output must repeat from run to run"
            whole += spent
            rounds += 1
        steps = rounds * load.batch * (load.generated_tokens - 1)
        decode = steps / (whole - first) if steps and whole > first else 0.0
        return rounds * load.batch * load.prompt_tokens / first, decode

    @property
    def ids_hash(self) -> str:
        return hashlib.sha256(repr([list(step) for step in zip(*self.generated, strict=True)]).encode()).hexdigest()[
            :16
        ]


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
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
