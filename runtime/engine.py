"""The Python API: load a folder, generate from prompts, stream, chat, read logits."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from torch import Tensor

from nibblelm.arguments import numeric_types, select_device, use_threads
from nibblelm.checkpoint import Checkpoint
from nibblelm.config import DecoderConfig, token_ids
from nibblelm.engine_core import Engine, Handle
from nibblelm.errors import NibbleLMError, RequestError
from nibblelm.executor import STEP_ROWS
from nibblelm.kv_cache import bytes_per_page, bytes_per_token
from nibblelm.memory import free_memory, require_memory
from nibblelm.models import family, open_model, tensor_plan
from nibblelm.ops import PROMPT_TILE
from nibblelm.ops.devices import kernels, reclaim
from nibblelm.pages import PAGE, page_count
from nibblelm.prompt_steps import PREFILL_CHUNK, program_bytes, workspace_bytes
from nibblelm.prompts import Prompt, plain_messages, prompt_ids, prompt_list
from nibblelm.request import GenerationOutput, LogitsRequest, Request, StreamPiece, Timings
from nibblelm.rope import rope_bytes
from nibblelm.runner import Runner
from nibblelm.sampling_params import SamplingParams
from nibblelm.scheduler import Scheduler, least_pages, most_pages
from nibblelm.sizes import parse_size
from nibblelm.speculation import speculation
from nibblelm.structured import Guides
from nibblelm.tokenizer import Tokenizer, load_tokenizer
from nibblelm.weights import CheckpointWeights, check_tensors

CUDA_CONTEXT = 8192
"""Positions of a sequence on a GPU when max_context is not given (or the model's limit, if that is smaller)."""

MAX_SEQUENCES = {"cpu": 64, "cuda": 256}
"""Sequences that are computed together; more wait for one to end."""

STEP_TOKENS = {"cpu": (512, 128), "cuda": (8192, 640)}
"""Tokens of a step without a sequence that generates, and of one with some: they wait for the prompts in it."""

KV_SHARE = 0.6
"""Of the memory that is free after the weights, the most that is taken for keys and values unasked."""

_UNFINISHED = 1024
"""Requests of one call that are in the engine at a time."""


class LLM:
    """A loaded model.

    model        a folder, or a hub id that is in (or can be fetched into) the local cache
    device       "auto" (CUDA when it works, else CPU), "cpu", "cuda" (the current card) or "cuda:1" (that one)
    dtype        activations. On the CPU the hidden state is always fp32, and dtype sets how the inputs of quantized
                 layers are rounded: "fp32" to 24-bit fixed point (as accurate as an fp32 dot product) with an fp32
                 cache, "bf16" to 16-bit, "auto" to 8-bit per group of K; both with a bf16 cache. On CUDA auto is bf16.
    kv           keys and values in the cache: "auto" as dtype says, "bf16", or "int8" with a scale for each position
                 and head, about half the bytes of bf16
    activations  bits that the inputs of quantized layers are rounded to instead, 8 or 16. None: on CUDA all 16 of bf16
                 (with fp32 24, and no choice), on the CPU what dtype says
    threads      CPU threads of all models in this process; None: as before, at first the cores that it may use
    max_context  positions, default the model's limit (on CUDA at most 8,192)
    strict       make unknown keys of config.json an error
    graph        replay decode steps as recorded programs (False: call by call, the same tokens)
    kv_memory    bytes for keys and values, also as "8G"; default what `max_sequences` of the whole context take, but at
                 most 60 % of what is free; on the CPU they are taken as they are used. A context that was not asked for
                 is cut to it. Where all layers have a sliding window, a sequence takes no more than its window and a
                 step need
    max_sequences   sequences that are computed together, default 64 on the CPU and 256 on CUDA; others wait
    speculate    "ngram": draft what may come next from prompt and output; the tokens are the same (docs/serving.md)

    Any number of threads and of streams read in turns may use one LLM: each gets the text it would get alone. One
    thread computes for all of them, from the first call to `close`, or to the end of the LLM. A stream whose reader is
    64 pieces behind sits out; one that is closed or dropped is not computed further.

    Raises ConfigError, CheckpointError, TokenizerError, DeviceError, or RequestError for an argument out of range.
    """

    def __init__(
        self,
        model: str | Path,
        device: str | torch.device = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        *,
        kv: str = "auto",
        activations: Literal[8, 16] | None = None,
        strict: bool = False,
        revision: str | None = None,
        graph: bool = True,
        kv_memory: int | str | None = None,
        max_sequences: int | None = None,
        speculate: Literal["ngram"] | None = None,
    ) -> None:
        begun = time.perf_counter()
        self.device = select_device(device)
        drafts = speculation(speculate, kernels(self.device))
        self.dtype, self.kv_dtype, self.activations = numeric_types(dtype, self.device, activations, kv)
        if threads is not None:
            use_threads(threads)
        checkpoint = open_model(model, revision)
        self.folder = checkpoint.folder
        self.config: DecoderConfig = family(checkpoint.config).read_config(checkpoint.config, strict)
        self.max_context = self._context(max_context)
        if isinstance(kv_memory, str):
            kv_memory = parse_size(kv_memory, "kv_memory", RequestError)
        _check_positive(kv_memory=kv_memory, max_sequences=max_sequences)
        self.max_sequences = max_sequences or MAX_SEQUENCES[self.device.type]
        self.generation_config = checkpoint.generation_config
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.folder)
        self.bos_id, self.eos_ids = self._special_ids(checkpoint)
        self._guides = Guides(self.tokenizer, self.config.vocab_size, self.eos_ids)
        check_tensors(checkpoint, tensor_plan(checkpoint.config))
        logits = self._kept_logits(0 if drafts is None else drafts.most_rows)
        programs = program_bytes(self.config, self.device, logits) if graph else 0
        reclaim(self.device)
        self.kv_pages = self._plan_pages(checkpoint, kv_memory, max_context is not None, programs)
        if self.kv_pages < least_pages(self.max_context, self.config.window):
            self.max_context = min(self.max_context, self.kv_tokens)
        weights = CheckpointWeights(checkpoint, self.device, self.dtype, self.activations)
        network = family(checkpoint.config).Model(weights, self.config, self.max_context)
        self.runner = Runner(network, self.device, self.kv_dtype, self.max_context, graph)
        self.runner.reserve(self.max_sequences + 1, self.kv_pages + 1)
        scheduler = Scheduler(self.max_sequences, self.kv_pages, STEP_TOKENS[self.device.type], self.config.window)
        self.engine = Engine(self.runner, scheduler, speculation=drafts)
        self.weight_bytes = weights.streamed_bytes
        self.load_s = time.perf_counter() - begun

    def _context(self, wanted: int | None) -> int:
        limit = self.config.max_positions
        if wanted is None:
            return limit if self.device.type == "cpu" else min(limit, CUDA_CONTEXT)
        if type(wanted) is not int or not 1 <= wanted <= limit:
            raise RequestError(f"a context of {wanted!r} positions was asked for; this model supports 1 to {limit}")
        return wanted

    def _kept_logits(self, drafted: int) -> int:
        """Rows of logits that programs keep: steps of all numbers of rows, their tokens chosen on the host or scored on
        the device, those of drafts, of `drafted` rows at most, and prompts, by powers of two of their tiles."""

        def up_to(most: int) -> int:
            return sum(rows for rows in STEP_ROWS[self.device.type] if rows < 2 * most)

        tiles = self.max_sequences + PREFILL_CHUNK[self.device.type] // PROMPT_TILE
        return 2 * up_to(self.max_sequences) + up_to(drafted) + 4 * tiles

    def _plan_pages(self, checkpoint: Checkpoint, kv_memory: int | None, asked: bool, programs: int) -> int:
        """Pages of keys and values. `asked`: the whole context was asked for by name, so that less will not do.
        `programs`: bytes that all of them would keep; a few, as fewer sequences need, have to find room."""
        c = self.config
        self._page_bytes = page_bytes = bytes_per_page(c.layers, c.kv_heads, c.head_dim, self.kv_dtype, self.device)
        wanted, least = page_count(self.max_context), least_pages(self.max_context, c.window)
        if c.window:
            wanted = min(wanted, most_pages(STEP_TOKENS[self.device.type][0], c.window))
        others = dict(
            weights=sum(checkpoint.info(name).nbytes for name in checkpoint.names()),
            rope=rope_bytes(self.config, self.max_context, self.max_sequences + 1),
            workspace=workspace_bytes(self.config, self.device),
            programs=min(programs, workspace_bytes(self.config, self.device)),
        )
        advice = "Choose a smaller max_context (--ctx-size) or kv_memory (--kv-memory), fewer bits, or device cpu."
        require_memory(self.device, advice, cache=kv_memory or page_bytes, **others)
        if kv_memory is None:
            taken = sum((others | dict(programs=programs)).values())
            taken = taken if self.device.type == "cuda" else 0  # the file is mapped, and may leave again
            kv_memory = max(int(KV_SHARE * (free_memory(self.device) - taken)), page_bytes)
            pages = min(self.max_sequences * wanted, kv_memory // page_bytes)
        else:
            pages = kv_memory // page_bytes
        if pages < (least if asked else 1):
            raise RequestError(
                f"{kv_memory / 2**20:.1f} MiB for keys and values hold {pages * PAGE} tokens of this model, in pages "
                f"of {PAGE}; {least * page_bytes / 2**20:.1f} MiB hold the context of {self.max_context}: choose a "
                "smaller max_context (--ctx-size), or name as much as this with kv_memory (--kv-memory)"
            )
        return pages

    def _special_ids(self, checkpoint: Checkpoint) -> tuple[int | None, set[int]]:
        """BOS and the end tokens: generation_config.json first, then config.json, then the tokenizer."""
        found: dict[str, list[int]] = {}
        for name, own in (("bos_token_id", "bos_id"), ("eos_token_id", "eos_id")):
            ids = token_ids(checkpoint.generation_config, name) or token_ids(checkpoint.config, name)
            fallback = getattr(self.tokenizer, own, None)
            found[name] = ids or ([] if fallback is None else [fallback])
        return next(iter(found["bos_token_id"]), None), set(found["eos_token_id"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of cache that one position of one sequence takes."""
        c = self.config
        return bytes_per_token(c.layers, c.kv_heads, c.head_dim, self.kv_dtype)

    @property
    def kv_tokens(self) -> int:
        """Positions, of all sequences together, that the memory for keys and values holds."""
        return self.kv_pages * PAGE

    @property
    def kv_bytes(self) -> int:
        """Bytes of that memory."""
        return self.kv_pages * self._page_bytes

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, n: None = None, **options: Any
    ) -> GenerationOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        **options: Any,
    ) -> Any: ...

    def generate(self, prompts: Any, params: Any = None, *, n: int | None = None, **options: Any) -> Any:
        """Continue one prompt (text, or token ids) or each of a list of prompts.

        Ids may be a list, a numpy array or a tensor. `params` may be a list, one for each prompt; options are fields of
        SamplingParams, which override those of `params`; unknown ones raise. Returns a GenerationOutput, or a list of
        them in the order of the prompts; with `n` a list of n outputs in each place, drawn with seed, seed + 1, ...

        A request that cannot go on (its logits are not finite, its grammar is too large) raises RequestError or
        SchemaError if it is the only one; in a list its output says so (`error`, `error_type`).
        """
        texts, single = prompt_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(texts)
        if len(each) != len(texts):
            raise RequestError(f"{len(each)} SamplingParams for {len(texts)} prompts; give one, or one for each prompt")
        if n is not None and (not isinstance(n, int) or n < 1):
            raise RequestError(f"n is {n!r}; supported: 1 or more outputs for each prompt")
        requests: list[Request] = []
        for i, (prompt, own) in enumerate(zip(texts, each, strict=True)):
            try:
                requests += self.requests(self.encode(prompt), self.resolve(own, options), n or 1)
            except RequestError as error:
                if single:
                    raise
                raise type(error)(f"prompts[{i}]: {error}") from error
        outputs = self._outputs(requests)
        if single and n is None:
            if outputs[0].error is not None:
                raise outputs[0].failure()
            return outputs[0]
        if n is None:
            return outputs
        lists = [outputs[first : first + n] for first in range(0, len(requests), n)]
        return lists[0] if single else lists

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[StreamPiece]:
        """Continue one prompt piece by piece; the last piece carries the output."""
        request = self.request(self.encode(prompt), self.resolve(params, options))
        return self._stream(request)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Handle:
        """Like `stream`, computed from now on: `handle.tokens()`, or in an event loop `async for piece in handle`.

        A request that cannot go on is an EngineError or, in its last piece, the output's `error`.
        """
        return self.engine.add(self.request(self.encode(prompt), self.resolve(params, options)))

    def stream_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamPiece]:
        """Answer a conversation through the chat template."""
        return self._stream(self.request(self.encode_chat(messages), self.resolve(params, options), answers=True))

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> GenerationOutput:
        """Like `stream_chat`, all at once."""
        output = [piece.output for piece in self.stream_chat(messages, params, **options)][-1]
        assert output is not None
        return output

    def logits(self, ids: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Logits (len(ids), vocab) in fp32 of a prompt of token ids, computed by prefill."""
        if isinstance(ids, str):
            raise RequestError("logits takes token ids, which encode makes of a text")
        request = LogitsRequest(prompt_ids(ids), self.config.vocab_size, self.max_context)
        return self.engine.add(request).result()

    def close(self) -> None:
        """End the thread that computes, as the end of a `with` block does. Unfinished requests, and later ones, get an
        EngineError."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kinds = f"{self.config.model_type}, {self.device}, activations {self.activations} bits"
        return f"LLM({str(self.folder)!r}: {kinds}, context {self.max_context})"

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it for the answer to come."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer; this folder has none")
        return self.encode_rendered(self.tokenizer.apply_chat_template(plain_messages(messages)))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what a chat template has rendered, which writes BOS itself."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise RequestError(
                "the chat template renders nothing for these messages; use generate, or mend the template"
            )
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as `generate` uses them: special tokens as the tokenizer adds them, BOS if empty."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                known = "tokenizer.json, vocab.json and merges.txt, or tokenizer.model"
                raise RequestError(f"this folder has no tokenizer; copy {known} into it, or pass token ids instead")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = prompt_ids(prompt)
        if ids:
            return ids
        if self.bos_id is None:
            raise RequestError("the prompt is empty, and this model has no BOS token to start from")
        return [self.bos_id]

    def request(self, ids: list[int], params: SamplingParams, answers: bool = False) -> Request:
        """What `engine.add` takes, for ids of `encode` or, with `answers`, of `encode_chat`, and params of `resolve`.

        Raises RequestError.
        """
        if params.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer; this folder has none: use stop_token_ids")
        own = (ids, params, self.tokenizer, self.config.vocab_size, self.max_context, self.eos_ids)
        return Request(*own, self._guides.guide(params), answers)

    def requests(self, ids: list[int], params: SamplingParams, count: int, answers: bool = False) -> list[Request]:
        """`request` for several outputs of one prompt: a seed that was asked for counts on."""
        return [self.request(ids, _nth(params, i), answers) for i in range(count)]

    def resolve(self, params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        """`params` with `options` in place of its fields, and generation_config.json's values where neither says."""
        if unknown := sorted(set(options) - SamplingParams.__dataclass_fields__.keys()):
            raise RequestError(f"unknown options {unknown}; known: {sorted(SamplingParams.__dataclass_fields__)}")
        if not isinstance(params, SamplingParams | None):
            raise RequestError(f"params is {params!r:.60}; supported: SamplingParams, or options by their names")
        params = params or SamplingParams()
        return (dataclasses.replace(params, **options) if options else params).resolve(self.generation_config)

    def _stream(self, request: Request) -> Iterator[StreamPiece]:
        handle = self.engine.add(request)
        try:
            for piece in handle.tokens():
                if piece.output is not None and piece.output.error is not None:
                    raise piece.output.failure()
                yield piece
        finally:
            handle.abort()

    def _outputs(self, requests: Iterable[Request]) -> list[GenerationOutput]:
        """Their outputs, in their order."""
        live: deque[Handle] = deque()
        outputs: list[GenerationOutput] = []
        try:
            for request in requests:
                if len(live) == _UNFINISHED:
                    outputs.append(live.popleft().result().output)
                live.append(self.engine.add(request, stream=False))
            while live:
                outputs.append(live[0].result().output)
                live.popleft()
            return outputs
        finally:
            for handle in live:
                handle.abort()


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several outputs for a prompt."""
    return params if params.seed is None else dataclasses.replace(params, seed=(params.seed + index) % 2**64)


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RequestError(f"{name} is {value!r}; supported: 1 or more, None for the default")


__all__ = ["LLM", "GenerationOutput", "NibbleLMError", "SamplingParams", "StreamPiece", "Timings"]
