"""One generation request: from a prompt's ids to its finished output."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from nibblelm.errors import RequestError, SchemaError
from nibblelm.sampler import Sampled, Sampler, row_logprobs
from nibblelm.sampling_params import SamplingParams
from nibblelm.structured import Guide
from nibblelm.tokenizer import TextStream, Tokenizer

FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Tokens and seconds of one request. `prefilled_tokens` leaves out what was found in the cache."""

    prompt_tokens: int
    prefilled_tokens: int
    prefill_s: float
    generated_tokens: int
    decode_s: float
    queue_s: float = 0.0  # before its prompt was begun
    drafted_tokens: int = 0  # that were computed as a draft, and those of them that were right
    accepted_tokens: int = 0

    @property
    def prefill_tok_s(self) -> float:
        return self.prefilled_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first per second of decoding."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s and self.generated_tokens > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """One finished request. `token_ids` includes the token that stopped it; `text` does not.

    finish_reason  "stop" (end token or stop string), "length" (`limit` says which: "max_tokens" or "context") or, in a
                   list of prompts, "error": `error` says why the request could not go on, text and ids stop before it;
                   `error_type` is the exception's name: "SchemaError" where the answer could not follow its schema
    stop_reason    the stop string, or the one of stop_token_ids, that ended it; None where it was the model's end token
    logprobs       per token, from the raw logits, if asked for; prompt_logprobs likewise (None for the first token)
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    limit: Literal["max_tokens", "context"] | None
    logprobs: list[Sampled] | None
    prompt_logprobs: list[Sampled | None] | None
    seed: int
    timings: Timings
    error: str | None = None
    error_type: str | None = None
    stop_reason: str | int | None = None

    def failure(self) -> RequestError:
        """What says that it could not go on, where nothing else is to be returned."""
        return (SchemaError if self.error_type == SchemaError.__name__ else RequestError)(self.error)


@dataclasses.dataclass(slots=True)  # as Sampled is
class StreamPiece:
    """One token of a stream: its new text (maybe empty), and its log-probabilities if asked for. The last piece carries
    the whole output."""

    text: str
    token_id: int | None
    output: GenerationOutput | None = None
    logprobs: Sampled | None = None


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError where a token id is outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}")


class Request:
    """One output on its way through the engine: `most` tokens after `ids`.

    answers    its text is a message of its own; else it goes on from that of `ids`
    every_row  whether `take_rows` is to see the logits of every prompt token
    share      tokens of the prompt that need not be computed if the cache has them
    """

    def __init__(
        self,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        context: int,
        end_ids: set[int],
        guide: Guide | None = None,
        answers: bool = False,
    ) -> None:
        # Of a prompt that is only scored, the token behind it is drawn, and takes no place.
        room = context - len(ids) + (params.prompt_logprobs is not None and params.max_tokens == 1)
        if room < 1:
            raise RequestError(f"the prompt has {len(ids)} tokens; the context of {context} leaves no room to generate")
        check_ids(ids, vocab_size)
        wanted = 256 if params.max_tokens is None else room if params.max_tokens == -1 else params.max_tokens
        self.ids, self.params, self.most = ids, params, min(wanted, room)
        self.limit: Literal["max_tokens", "context"] = (
            "context" if room < wanted or params.max_tokens == -1 else "max_tokens"
        )
        self.ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else end_ids)
        self.sampler = Sampler(params, vocab_size, ids, self.ends, guide)
        self.text = None
        if tokenizer is not None:
            after = () if answers else ids
            self.text = TextStream(tokenizer, params.stop or (), params.skip_special_tokens, after)
        self.sampled: list[Sampled] = []
        self.every_row = params.prompt_logprobs is not None
        self.share = 0 if self.every_row else len(ids)
        self.prompt_logprobs: list[Sampled | None] | None = None
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.error_type: str | None = None
        self.start = 0  # prompt tokens that were found in the cache
        self.drafted_tokens = self.accepted_tokens = 0
        self.created = self.last = time.perf_counter()  # `last`: when its newest token came
        self.begun = self.first = 0.0

    def begin(self) -> None:
        """The first chunk of the prompt is about to be computed."""
        self.begun = self.begun or time.perf_counter()

    def take_rows(self, first: int, logits: Tensor) -> None:
        """Logits (n, vocab) of the prompt's tokens from `first` on; from 0 again if they were lost on the way."""
        most = self.params.prompt_logprobs
        assert most is not None
        scores = self.prompt_logprobs = [None] if first == 0 or self.prompt_logprobs is None else self.prompt_logprobs
        following = self.ids[first + 1 : first + 1 + len(logits)]
        scores += row_logprobs(logits[: len(following)], following, most)
        self.every_row = len(scores) < len(self.ids)

    def prompt_done(self, reused: int) -> None:
        """The first token is chosen; `reused` tokens of the prompt were found in the cache."""
        self.first, self.start = time.perf_counter(), reused

    def accept(self, chosen: Sampled | RequestError) -> StreamPiece:
        """Take the next token, and say what text it makes safe to show. An error in its place ends the request."""
        if isinstance(chosen, RequestError):
            self.finish, self.error, self.error_type = "error", str(chosen), type(chosen).__name__
            return StreamPiece("" if self.text is None else self.text.flush(), None, self.output())
        self.sampled.append(chosen)
        text = ""
        if chosen.token_id in self.ends:
            self.finish = "stop"
        elif self.text is not None:
            text = self.text.push(chosen.token_id)
            self.finish = None if self.text.stop is None else "stop"
        if self.finish is None and len(self.sampled) == self.most:
            self.finish = "length"
        if self.finish is not None and self.text is not None:
            text += self.text.flush()
            if self.finish == "length" and self.text.stop is not None:  # what was held back has completed it
                self.finish = "stop"
        logprobs = None if self.params.logprobs is None else chosen
        return StreamPiece(text, chosen.token_id, self.output() if self.finish else None, logprobs)

    def output(self) -> GenerationOutput:
        assert self.finish is not None
        now = time.perf_counter()
        return GenerationOutput(
            text="" if self.text is None else self.text.text,
            token_ids=[s.token_id for s in self.sampled],
            finish_reason=self.finish,
            limit=self.limit if self.finish == "length" else None,
            logprobs=None if self.params.logprobs is None else self.sampled,
            prompt_logprobs=self.prompt_logprobs,
            seed=self.sampler.seed,
            timings=Timings(
                len(self.ids),
                len(self.ids) - self.start,
                self.first - self.begun,
                len(self.sampled),
                now - self.first,
                self.begun - self.created,
                self.drafted_tokens,
                self.accepted_tokens,
            ),
            error=self.error,
            error_type=self.error_type,
            stop_reason=self._stop_reason(),
        )

    def _stop_reason(self) -> str | int | None:
        if self.finish != "stop" or (self.text is not None and self.text.stop is not None):
            return None if self.text is None else self.text.stop
        last = self.sampled[-1].token_id
        return last if last in (self.params.stop_token_ids or ()) else None


class LogitsRequest:
    """The logits of every token of a prompt, and nothing generated."""

    most = 0
    every_row = True
    share = 0

    def __init__(self, ids: list[int], vocab_size: int, context: int) -> None:
        if not 1 <= len(ids) <= context:
            raise RequestError(f"prefill of {len(ids)} tokens: the context has room for 1 to {context}")
        check_ids(ids, vocab_size)
        self.ids = ids
        self._rows: list[Tensor] = []

    def begin(self) -> None:
        """Nothing is timed."""

    def take_rows(self, first: int, logits: Tensor) -> None:
        """Logits (n, vocab) of the tokens from `first` on; from 0 again if they were lost on the way."""
        self._rows = [*(self._rows if first else []), logits]

    def output(self) -> Tensor:
        """Logits (len(ids), vocab), fp32: a tensor of the caller's own, which may be written to and take gradients."""
        with torch.inference_mode(False):
            return torch.cat(self._rows)
