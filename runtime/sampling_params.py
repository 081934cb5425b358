"""How a request is to be continued: what callers may ask for, and the ranges."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

from nibblelm.errors import ConfigError, RequestError

# where neither a request nor generation_config.json says
DEFAULTS: dict[str, float] = {
    "max_tokens": 256,
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_FILE_KEYS = {"max_tokens": "max_new_tokens"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}

_MOST_BIAS = 1e38  # beyond it fp32 has none

_LONGEST_MARK = 64  # a token can end it in as many places

_LISTS, _MAPPINGS = (tuple, list, Sequence), (dict, Mapping)  # what is asked of an abstract class takes long

_NUMBERS: dict[str, tuple[type, float, float, str]] = {  # least and most, and how a message says that
    "max_tokens": (int, 1, math.inf, "-1 (no limit) or at least 1"),
    "temperature": (float, 0, 100, "0 (greedy) to 100"),
    "top_k": (int, 0, math.inf, "0 or -1 (off), or more"),
    "top_p": (float, 0, 1, "0 to 1 (off)"),
    "min_p": (float, 0, 1, "0 (off) to 1"),
    "repetition_penalty": (float, 0.01, 100, "0.01 to 100, 1 is off"),
    "presence_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "frequency_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "seed": (int, 0, 2**64 - 1, "0 to 2**64 - 1, or -1 (random)"),
    "min_tokens": (int, 0, math.inf, "0 (off) or more"),
    "logprobs": (int, 0, math.inf, "0 or more"),
    "prompt_logprobs": (int, 0, math.inf, "0 or more"),
}


_MINUS_ONE = {"max_tokens": -1, "top_k": 0, "seed": None}
"""What -1 means where other engines have it so."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. None means generation_config.json's value, else the default; see `resolve`.

    max_tokens          most tokens to generate (256); -1: until end of sequence or the context limit
    temperature         0: greedy; 0.8
    top_k               0 or -1: off (the default)
    top_p, min_p        1 and 0: off; 0.95 and 0
    repetition_penalty  1: off; counts prompt and output
    presence_penalty, frequency_penalty   0: off; count output
    logit_bias          added to the logits of these token ids; -inf forbids a token
    seed                None or -1: random, reported with the result
    stop                strings that end the text; they are not part of it
    stop_token_ids      tokens that end it, besides the model's own
    ignore_eos          go on after the end-of-sequence token
    min_tokens          tokens before which neither an end token nor one of stop_token_ids is chosen; 0: off; at most
                        max_tokens, which is looked at where both are known
    skip_special_tokens False: the text shows special tokens, which it leaves out otherwise; a list: those in it
    schema              a JSON schema (a mapping, or its text) that the answer follows; {"type": "object"}: any object
    regex, grammar      or a regular expression (Rust's syntax), or a grammar in llguidance's form of Lark
    guided_after        a text in the answer, as "</think>", behind which alone it follows one of these three; before it
                        an end token is not chosen
    logprobs, prompt_logprobs   n: report the log-probability of each token and of the n most likely ones

    Raises RequestError with the parameter, the value it got and the range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool | Sequence[str] = True
    schema: Mapping[str, Any] | Literal[True] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    guided_after: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high, supported) in _NUMBERS.items():
            if (value := getattr(self, name)) is not None and (type(value) is not kind or not low <= value <= high):
                object.__setattr__(self, name, _number(name, value, kind, low, high, supported))
        if self.min_tokens is None:
            object.__setattr__(self, "min_tokens", 0)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        _require(
            isinstance(stop, _LISTS) and all(isinstance(text, str) and text for text in stop),
            "stop", self.stop, "a string or a list of strings, none of them empty",
        )  # fmt: skip
        _require(
            isinstance(stop_ids, _LISTS) and all(_is_id(i) for i in stop_ids),
            "stop_token_ids", self.stop_token_ids, "a list of token ids",
        )  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        skips = self.skip_special_tokens
        named = (
            isinstance(skips, _LISTS) and not isinstance(skips, str) and all(isinstance(text, str) for text in skips)
        )
        supported = "True, False, or a list of special tokens that are shown"
        _require(isinstance(skips, bool) or named, "skip_special_tokens", skips, supported)
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        _require(
            isinstance(bias, _MAPPINGS) and all(_is_id(i) and _is_bias(value) for i, value in bias.items()),
            "logit_bias", self.logit_bias, "a mapping from token ids to numbers of at most 1e38, or minus infinity",
        )  # fmt: skip
        _require(
            self.schema is None or self.schema is True or isinstance(self.schema, Mapping | str),
            "schema", self.schema, "a JSON schema as a mapping or its text, or True for any JSON value",
        )  # fmt: skip
        for name in ("regex", "grammar"):
            _require(isinstance(getattr(self, name), str | None), name, getattr(self, name), "text")
        guided = [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]
        if guided:
            ends = f"with {guided}, which end answers"
            if len(guided) > 1:
                raise RequestError(f"{' and '.join(guided)} are given; supported: one of schema, regex and grammar")
            _require(not self.ignore_eos, "ignore_eos", True, f"False {ends}")
            _require(not self.min_tokens, "min_tokens", self.min_tokens, f"0 {ends}")
        if self.guided_after is not None:
            _require(
                bool(guided) and isinstance(self.guided_after, str) and 0 < len(self.guided_after) <= _LONGEST_MARK
                and self.guided_after.isprintable(),
                "guided_after", self.guided_after,
                f"1 to {_LONGEST_MARK} printable characters, beside a schema, a regex or a grammar",
            )  # fmt: skip
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", {int(i): float(value) for i, value in bias.items()})
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stop_ids)))

    def resolve(self, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """These parameters with every None of a sampling parameter filled in (seed and logprobs stay).

        `do_sample: false` in generation_config.json means temperature 0 unless one was asked for; its
        `eos_token_id` is the engine's business. Raises ConfigError where the file's value is out of range, RequestError
        for more min_tokens than max_tokens.
        """
        resolved = self._filled(generation_config)
        most = resolved.max_tokens
        fits = most is None or most < 0 or resolved.min_tokens <= most
        _require(fits, "min_tokens", resolved.min_tokens, f"at most max_tokens, which is {most}")
        return resolved

    def _filled(self, generation_config: Mapping[str, Any]) -> "SamplingParams":
        lacking = [name for name in DEFAULTS if getattr(self, name) is None]
        if not lacking:
            return self
        own = {name: value for name, key in _FILE_KEYS.items() if (value := generation_config.get(key)) is not None}
        if generation_config.get("do_sample") is False:
            own["temperature"] = 0.0
        own = {name: own[name] for name in lacking if name in own}
        try:
            filled = replace(self, **own) if own else self
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from error
        resolved = object.__new__(SamplingParams)  # the defaults need no check
        resolved.__dict__.update(filled.__dict__, **{name: DEFAULTS[name] for name in lacking if name not in own})
        return resolved


def _require(condition: bool, name: str, value: object, supported: str) -> None:
    if not condition:
        raise RequestError(f"{name} is {value!r}; supported: {supported}")


def _number(name: str, value: Any, kind: type, low: float, high: float, supported: str) -> Any:
    """A number of NumPy, or a fraction, as what computes with it knows them. Raises RequestError for any other."""
    abstract: Any = Integral if kind is int else Real
    number = type(value) is int or (isinstance(value, abstract) and not isinstance(value, bool))
    if number and value == -1 and name in _MINUS_ONE:
        return _MINUS_ONE[name]
    _require(bool(number and low <= value <= high), name, value, f"{kind.__name__}, {supported}")
    return kind(value)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**31


def _is_bias(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return float(value) == -math.inf or abs(float(value)) <= _MOST_BIAS
    except OverflowError:
        return False
