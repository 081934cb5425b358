"""The Python API: load a folder, generate from prompts, stream, chat, read logits."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.checkpoint import Checkpoint, open_checkpoint
from nibblelm.config import DecoderConfig, token_ids
from nibblelm.errors import DeviceError, NibbleLMError, RequestError
from nibblelm.kv_cache import bytes_per_token
from nibblelm.layers import rope_bytes
from nibblelm.memory import require_memory
from nibblelm.models import family, tensor_plan
from nibblelm.ops.types import ActivationBits
from nibblelm.request import GenerationOutput, Request, StreamPiece, Timings
from nibblelm.runner import Runner, SampledSteps, workspace_bytes
from nibblelm.sampler import Sampled, SamplingParams, device_sampling, token_logprobs
from nibblelm.tokenizer import Tokenizer, load_tokenizer
from nibblelm.weights import CheckpointWeights, check_tensors

Prompt = str | Sequence[int]
MAX_BATCH = 16
"""Sequences decoded together; more prompts wait for a free slot."""

CUDA_CONTEXT = 8192
"""Positions allocated on a GPU when max_context is not given (or the model's limit, if that is smaller)."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Requests (by index) whose decode steps sample on the device."""

    members: list[int]
    steps: SampledSteps


class LLM:
    """A loaded model.

    model        a folder, or a hub id that is in (or can be fetched into) the local cache
    device       "auto" (CUDA when it works, else CPU), "cpu" or "cuda"
    dtype        activations. On the CPU the hidden state is always fp32, and dtype sets how the inputs of quantized
                 layers are rounded: "fp32" to 24-bit fixed point (as accurate as an fp32 dot product) with an fp32
                 cache, "bf16" to 16-bit, "auto" to 8-bit per group of K; both with a bf16 cache. On CUDA auto is bf16.
    threads      CPU threads, default the cores this process may use
    max_context  positions, default the model's limit (on CUDA at most 8,192)
    strict       make unknown keys of config.json an error
    graph        replay decode steps as recorded programs (False: call by call, the same tokens)

    Raises ConfigError, CheckpointError, TokenizerError or DeviceError.
    """

    def __init__(
        self,
        model: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        *,
        strict: bool = False,
        revision: str | None = None,
        graph: bool = True,
    ) -> None:
        begun = time.perf_counter()
        self.device = select_device(device)
        self.dtype, self.kv_dtype, activation_bits = numeric_types(dtype, self.device)
        if threads is not None:
            ops.set_threads(threads)
        checkpoint = open_checkpoint(model, revision)
        self.folder = checkpoint.folder
        self.config: DecoderConfig = family(checkpoint.config).read_config(checkpoint.config, strict)
        self.max_context = self._context(max_context)
        self.generation_config = checkpoint.generation_config
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.folder)
        self.bos_id, self.eos_ids = self._special_ids(checkpoint)
        check_tensors(checkpoint, tensor_plan(checkpoint.config), self.config.tied)
        require_memory(
            self.device,
            "Choose a smaller max_context (--ctx-size), fewer bits, or device cpu.",
            weights=sum(checkpoint.info(name).nbytes for name in checkpoint.names()),
            cache=self.kv_bytes_per_token * self.max_context,
            rope=rope_bytes(self.config, self.max_context),
            workspace=workspace_bytes(self.config, self.device),
        )
        weights = CheckpointWeights(checkpoint, self.device, self.dtype, activation_bits)
        network = family(checkpoint.config).Model(weights, self.config, self.max_context)
        self.runner = Runner(network, self.device, self.kv_dtype, self.max_context, graph)
        self.weight_bytes = weights.streamed_bytes
        self.load_s = time.perf_counter() - begun

    def _context(self, wanted: int | None) -> int:
        limit = self.config.max_positions
        if wanted is None:
            return limit if self.device.type == "cpu" else min(limit, CUDA_CONTEXT)
        if not 1 <= wanted <= limit:
            raise RequestError(f"a context of {wanted} positions was asked for; this model supports 1 to {limit}")
        return wanted

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

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **options: Any) -> GenerationOutput: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt] | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Any: ...

    def generate(self, prompts: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """Continue one prompt (text, or a list of token ids) or each of a list of prompts.

        options are fields of SamplingParams, which override those of `params`; unknown ones raise.
        Returns a GenerationOutput, or a list of them in the order of the prompts.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))
        resolved = self._params(params, options)
        requests = [self._request(self.encode(p), resolved) for p in ([prompts] if single else prompts)]
        outputs: dict[int, GenerationOutput] = {}
        for index, piece in self._run(requests):
            if piece.output is not None:
                outputs[index] = piece.output
        return outputs[0] if single else [outputs[i] for i in range(len(requests))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[StreamPiece]:
        """Continue one prompt piece by piece; the last piece carries the output."""
        request = self._request(self.encode(prompt), self._params(params, options))
        return (piece for _, piece in self._run([request]))

    def stream_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamPiece]:
        """Answer a conversation through the chat template. Turns already in the cache are not computed again."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer; this folder has none")
        ids = self.tokenizer.encode(self.tokenizer.apply_chat_template(list(messages)), add_special_tokens=False)
        request = self._request(ids, self._params(params, options))
        request.start = self._shared_prefix(ids)
        return (piece for _, piece in self._run([request]))

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> GenerationOutput:
        """Like `stream_chat`, all at once."""
        output = [piece.output for piece in self.stream_chat(messages, params, **options)][-1]
        assert output is not None
        return output

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (len(ids), vocab) in fp32 of a prompt of token ids, computed by prefill."""
        with torch.inference_mode():
            return self.runner.prefill(list(ids), every_row=True)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as `generate` uses them: special tokens as the tokenizer adds them, BOS if empty."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this folder has no tokenizer; pass token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if ids:
            return ids
        if self.bos_id is None:
            raise RequestError("the prompt is empty, and this model has no BOS token to start from")
        return [self.bos_id]

    def _request(self, ids: list[int], params: SamplingParams) -> Request:
        return Request(ids, params, self.tokenizer, self.config.vocab_size, self.max_context, self.eos_ids)

    def _params(self, params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        if unknown := sorted(set(options) - known):
            raise RequestError(f"unknown options {unknown}; known: {sorted(known)}")
        return dataclasses.replace(params or SamplingParams(), **options).resolve(self.generation_config)

    def _shared_prefix(self, ids: Sequence[int]) -> int:
        """How many leading ids are in the cache of slot 0; at least one token is left to compute."""
        shared = 0
        for old, new in zip(self.runner.history[0], ids[:-1], strict=False):
            if old != new:
                break
            shared += 1
        return shared

    @torch.inference_mode()
    def _prefill(self, request: Request) -> Tensor:
        if request.params.prompt_logprobs is None:
            logits = self.runner.prefill(request.ids, request.slot, request.start)
        else:
            request.start = 0
            rows = self.runner.prefill(request.ids, request.slot, every_row=True)
            most = request.params.prompt_logprobs
            scores = (token_logprobs(row, token, most) for row, token in zip(rows[:-1], request.ids[1:], strict=True))
            request.prompt_logprobs = [None, *scores]
            logits = rows[-1:]
        return logits

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, StreamPiece]]:
        """Prefill each request alone, decode up to MAX_BATCH together; yields (index of the request, piece)."""
        self.runner.reserve(min(len(requests), MAX_BATCH))
        waiting = deque(enumerate(requests))
        free = deque(range(min(len(self.runner.history), MAX_BATCH)))
        active: dict[int, Request] = {}
        flight: _Flight | None = None
        while waiting or active:
            if waiting and free and not (flight and flight.steps.in_flight):
                index, request = waiting.popleft()
                request.slot, request.begun = free.popleft(), time.perf_counter()
                active[index] = request
                chosen = self._choose({index: request}, self._prefill(request))
                request.first = time.perf_counter()
            elif self.device.type == "cuda" and all(r.params.logprobs is None for r in active.values()):
                flight, chosen = self._fly(flight, active)
            else:
                ids, slots = zip(*((r.sampled[-1].token_id, r.slot) for r in active.values()), strict=True)
                with torch.inference_mode():
                    chosen = self._choose(active, self.runner.decode(ids, slots))
            for index, token in chosen.items():
                piece = active[index].accept(token)
                if piece.output is not None:
                    free.append(active.pop(index).slot)
                yield index, piece

    @torch.inference_mode()
    def _fly(self, flight: "_Flight | None", active: dict[int, Request]) -> tuple["_Flight | None", dict[int, Sampled]]:
        """One step of decoding that samples on the device. When the batch changes, the step in flight comes first."""
        changed = flight is not None and flight.members != list(active)
        if flight is None or (changed and not flight.steps.in_flight):
            state = device_sampling([r.sampler for r in active.values()], self.config.vocab_size)
            ids, slots = [r.sampled[-1].token_id for r in active.values()], [r.slot for r in active.values()]
            flight, changed = _Flight(list(active), self.runner.sampled_steps(ids, slots, state)), False
        last = changed or all(len(r.sampled) + 1 >= r.most for r in active.values())
        tokens = zip(flight.members, flight.steps.next(last), strict=True)
        chosen = {index: active[index].sampler.accept(token) for index, token in tokens if index in active}
        return (None if changed else flight), chosen

    @torch.inference_mode()
    def _choose(self, batch: dict[int, Request], logits: Tensor) -> dict[int, Sampled]:
        """The next token of each request, from its row of logits (M, vocab)."""
        samplers = [r.sampler for r in batch.values()]
        greedy: list[int] = ops.argmax(logits).tolist() if any(s.takes_argmax for s in samplers) else []
        with _one_torch_thread():
            chosen = [
                s.accept(greedy[i]) if s.takes_argmax else s.sample(row)
                for i, (s, row) in enumerate(zip(samplers, logits, strict=True))
            ]
        return dict(zip(batch, chosen, strict=True))


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Sampling is too small to share out: torch's threads would wait for each other and for the kernels' own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def select_device(name: str) -> torch.device:
    """The device of a name; "cuda" raises DeviceError with the reason when it cannot be used."""
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    works, reason = ops.cuda_available()
    if name == "cuda" and not works:
        raise DeviceError(f"device cuda cannot be used: {reason}")
    return torch.device("cuda" if works else "cpu")


def numeric_types(name: str, device: torch.device) -> tuple[torch.dtype, torch.dtype, ActivationBits]:
    """What a `dtype` option means on a device: activations, cache, and bits of the inputs of quantized layers."""
    if name not in ("auto", "fp32", "bf16"):
        raise RequestError(f"dtype {name!r} is not supported; use auto, fp32 or bf16")
    if name == "fp32":
        return torch.float32, torch.float32, 24
    if device.type == "cuda":
        return torch.bfloat16, torch.bfloat16, 16
    return torch.float32, torch.bfloat16, 16 if name == "bf16" else 8


__all__ = ["LLM", "GenerationOutput", "NibbleLMError", "SamplingParams", "StreamPiece", "Timings"]
