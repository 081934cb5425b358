"""The Python API: load a folder, generate from prompts, stream, chat, read logits."""

import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import current_thread
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from nibblelm import _cpu, ops
from nibblelm.batch import MAX_BATCH, Batch
from nibblelm.checkpoint import Checkpoint, open_checkpoint
from nibblelm.config import DecoderConfig, token_ids
from nibblelm.errors import DeviceError, NibbleLMError, RequestError
from nibblelm.kv_cache import bytes_per_token
from nibblelm.layers import rope_bytes
from nibblelm.memory import require_memory
from nibblelm.models import family, tensor_plan
from nibblelm.ops.types import ActivationBits
from nibblelm.request import GenerationOutput, Request, StreamPiece, Timings, check_ids
from nibblelm.runner import Runner, workspace_bytes
from nibblelm.runner_pool import Loan, RunnerPool
from nibblelm.sampler import SamplingParams
from nibblelm.tokenizer import Tokenizer, load_tokenizer
from nibblelm.weights import CheckpointWeights, check_tensors

Prompt = str | Sequence[int] | np.ndarray | Tensor
CUDA_CONTEXT = 8192
"""Positions allocated on a GPU when max_context is not given (or the model's limit, if that is smaller)."""


class LLM:
    """A loaded model.

    model        a folder, or a hub id that is in (or can be fetched into) the local cache
    device       "auto" (CUDA when it works, else CPU), "cpu" or "cuda"
    dtype        activations. On the CPU the hidden state is always fp32, and dtype sets how the inputs of quantized
                 layers are rounded: "fp32" to 24-bit fixed point (as accurate as an fp32 dot product) with an fp32
                 cache, "bf16" to 16-bit, "auto" to 8-bit per group of K; both with a bf16 cache. On CUDA auto is bf16.
    activations  bits that the inputs of quantized layers are rounded to instead, 8 or 16. None: on CUDA all 16 of bf16
                 (with fp32 24, and no choice), on the CPU what dtype says
    threads      CPU threads, default the cores this process may use
    max_context  positions, default the model's limit (on CUDA at most 8,192)
    strict       make unknown keys of config.json an error
    graph        replay decode steps as recorded programs (False: call by call, the same tokens)

    Any number of threads and of streams read in turns may use one LLM: each gets the text it would get alone. Up to 16
    calls (`generate`, or a stream from its first piece until it ends, is closed or is dropped) are live at a time, each
    with a cache of its own; threads that hold none wait for one, a thread that holds one gets a RequestError.

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
        activations: Literal[8, 16] | None = None,
        strict: bool = False,
        revision: str | None = None,
        graph: bool = True,
    ) -> None:
        begun = time.perf_counter()
        self.device = select_device(device)
        self.dtype, self.kv_dtype, self.activations = numeric_types(dtype, self.device, activations)
        if threads is not None:
            use_threads(threads)
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
        weights = CheckpointWeights(checkpoint, self.device, self.dtype, self.activations)
        network = family(checkpoint.config).Model(weights, self.config, self.max_context)
        self._pool = RunnerPool(lambda: Runner(network, self.device, self.kv_dtype, self.max_context, graph))
        self.runner = self._pool.runners[0]
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

        A request that cannot go on (its logits are not finite) raises RequestError if it is the only one; in a list its
        output says so (`error`).
        """
        texts, single = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(texts)
        if len(each) != len(texts):
            raise RequestError(f"{len(each)} SamplingParams for {len(texts)} prompts; give one, or one for each prompt")
        if n is not None and (not isinstance(n, int) or n < 1):
            raise RequestError(f"n is {n!r}; supported: 1 or more outputs for each prompt")
        requests: list[Request] = []
        for prompt, own in zip(texts, each, strict=True):
            ids, resolved = self.encode(prompt), self._params(own, options)
            requests += [self._request(ids, _nth(resolved, i)) for i in range(n or 1)]
        if single and n is None:
            return [piece.output for piece in self._stream(requests[0])][-1]
        outputs = {index: piece.output for index, piece in self._run(requests) if piece.output is not None}
        if n is None:
            return [outputs[i] for i in range(len(requests))]
        lists = [[outputs[first + i] for i in range(n)] for first in range(0, len(requests), n)]
        return lists[0] if single else lists

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[StreamPiece]:
        """Continue one prompt piece by piece; the last piece carries the output."""
        request = self._request(self.encode(prompt), self._params(params, options))
        return self._stream(request)

    def stream_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamPiece]:
        """Answer a conversation through the chat template. Turns already in the cache are not computed again."""
        request = self._request(self.encode_chat(messages), self._params(params, options))
        return self._stream(request, reuse=True)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> GenerationOutput:
        """Like `stream_chat`, all at once."""
        output = [piece.output for piece in self.stream_chat(messages, params, **options)][-1]
        assert output is not None
        return output

    def logits(self, ids: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Logits (len(ids), vocab) in fp32 of a prompt of token ids, computed by prefill."""
        ids = _token_ids(ids)
        check_ids(ids, self.config.vocab_size)
        with Loan() as loan:
            runner = self._pool.borrow(loan, 1)
            with self._pool.lock, torch.inference_mode():
                return runner.prefill(ids, every_row=True)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it for the answer to come."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer; this folder has none")
        ids = self.tokenizer.encode(self.tokenizer.apply_chat_template(list(messages)), add_special_tokens=False)
        if not ids:
            raise RequestError(
                "the chat template renders nothing for these messages; use generate, or mend the template"
            )
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as `generate` uses them: special tokens as the tokenizer adds them, BOS if empty."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this folder has no tokenizer; pass token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = _token_ids(prompt)
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

    def _stream(self, request: Request, reuse: bool = False) -> Iterator[StreamPiece]:
        for _, piece in self._run([request], reuse):
            if request.error is not None:
                raise RequestError(request.error)
            yield piece

    def _run(self, requests: Sequence[Request], reuse: bool = False) -> Iterator[tuple[int, StreamPiece]]:
        """(Index of the request, piece) as tokens come. The runner is this call's own until the iterator goes away."""
        with Loan() as loan:
            slots = min(len(requests), MAX_BATCH)
            batch = Batch(self._pool.borrow(loan, slots, requests[0].ids if reuse else ()), requests, reuse)
            while batch.unfinished:
                loan.thread = current_thread()  # a stream may be handed on
                with self._pool.lock:
                    pieces = batch.step()
                yield from pieces


def _plain(value: Any) -> Any:
    """numpy's and torch's values as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single one."""
    values = _plain(prompts)
    if isinstance(values, str):
        return [values], True
    if isinstance(values, Mapping | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"prompts is {prompts!r:.60}; supported: text, token ids, or a list of such prompts")
    values = [_plain(value) for value in values]
    single = bool(values) and all(isinstance(value, int) for value in values)
    return [values] if single else values, single


def _token_ids(prompt: Any) -> list[int]:
    values = _plain(prompt)
    ids = [_plain(i) for i in values] if isinstance(values, Iterable) else [values]
    if isinstance(values, Mapping | bytes) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RequestError(f"a prompt is text or a list of token ids (integers), got {prompt!r:.60}")
    return ids


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several outputs for a prompt: a seed that was asked for counts on."""
    return params if params.seed is None else dataclasses.replace(params, seed=(params.seed + index) % 2**64)


def use_threads(count: int) -> None:
    """Compute on `count` CPU threads, but on no more than the cores this process may use: they would wait for each
    other."""
    if not isinstance(count, int) or count < 1:
        raise RequestError(f"threads is {count!r}; supported: 1 or more, None for the cores this process may use")
    if count > (cores := _cpu.usable_cores()):
        warnings.warn(
            f"{count} threads were asked for; this process may use {cores} cores, so {cores} run", stacklevel=3
        )
    ops.set_threads(min(count, cores))


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


def numeric_types(
    name: str, device: torch.device, activations: Literal[8, 16] | None = None
) -> tuple[torch.dtype, torch.dtype, ActivationBits]:
    """What `dtype` and `activations` mean on a device: hidden state, cache, and bits of the inputs of quantized layers.

    Raises RequestError for what is not supported.
    """
    if name not in ("auto", "fp32", "bf16"):
        raise RequestError(f"dtype {name!r} is not supported; use auto, fp32 or bf16")
    if activations is not None and (not isinstance(activations, int) or activations not in (8, 16)):
        raise RequestError(f"activations is {activations!r}; supported: 8 or 16 bits, None for what dtype says")
    if name == "fp32":
        if activations is not None and device.type == "cuda":
            raise RequestError(
                f"activations {activations} with dtype fp32 is not supported on CUDA, where inputs in fp32 have 24 "
                "bits; use dtype bf16 (the default there), or leave activations out"
            )
        return torch.float32, torch.float32, activations or 24
    if device.type == "cuda":
        return torch.bfloat16, torch.bfloat16, activations or 16
    return torch.float32, torch.bfloat16, activations or (16 if name == "bf16" else 8)


__all__ = ["LLM", "GenerationOutput", "NibbleLMError", "SamplingParams", "StreamPiece", "Timings"]
