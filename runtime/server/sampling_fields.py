"""The fields that /v1/completions and /v1/chat/completions share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nibblelm.sampling_params import SamplingParams
from nibblelm.server.fields import Fields, is_integer

MOST_OUTPUTS = 128
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_BIASES = 1024
MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class Common:
    """How to generate, and how to send it."""

    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    guided: bool  # the answer has to follow something


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Fields of vLLM's that clients send with the value by which nothing changes, which is the one supported."""


def read_common(f: Fields, generation_config: dict[str, Any], **others: int | None) -> Common:
    """Take the fields that both endpoints have; parameters that they name differently are passed in. Raises ConfigError
    where generation_config.json, which has the last word, is wrong."""
    given = _guided(f)
    guided = bool(given)
    stream = f.flag("stream")
    usage = False
    if not f.lacks("stream_options"):
        if not stream:
            f.refuse(
                "stream_options",
                f.take("stream_options", "an object", lambda v: isinstance(v, dict)),
                "nothing without stream",
            )
        stream_options = f.object("stream_options")
        assert stream_options is not None
        usage = stream_options.flag("include_usage")
        stream_options.choice("include_obfuscation", False)
        stream_options.choice("continuous_usage_stats", False)
        stream_options.end()
    f.labels("user", "safety_identifier", "prompt_cache_key", "metadata")
    f.choice("store", False)
    f.choice("service_tier", "auto", "default")
    n = f.integer("n", 1, MOST_OUTPUTS) or 1
    for name in f.among(_NEUTRAL):
        f.choice(name, *_NEUTRAL[name])
    for name in f.among(_READERS):  # a request has few of them
        given[name] = _READERS[name](f, name)
    if guided and given.get("ignore_eos"):
        f.refuse("ignore_eos", True, "false where the answer follows a schema, regex or grammar, which ends it")
    if guided and given.get("min_tokens"):
        supported = "0 where the answer follows a schema, regex or grammar, which may have to end before"
        f.refuse("min_tokens", given["min_tokens"], supported)
    params = SamplingParams(**others, **given)
    if params.max_tokens is not None and 0 < params.max_tokens < params.min_tokens:
        f.refuse("min_tokens", params.min_tokens, f"at most {params.max_tokens}, the most tokens of the answer")
    return Common(params.resolve(generation_config), n, stream, usage, guided)


def _guided(f: Fields) -> dict[str, Any]:
    """What the answer has to follow: response_format, or one of the extensions regex and grammar."""
    given: dict[str, Any] = {name: value for name in ("regex", "grammar") if (value := f.text(name)) is not None}
    form = f.object("response_format")
    if form is not None:
        match form.choice("type", "text", "json_object", "json_schema", required=True):
            case "json_object":
                given["schema"] = {"type": "object"}
            case "json_schema":
                given["schema"] = _schema(form)
        form.end()
    if len(given) > 1:
        name = next(name for name in ("regex", "grammar") if name in given)
        f.refuse(name, given[name], "one of response_format, regex and grammar")
    return given


def _schema(form: Fields) -> dict[str, Any]:
    described = form.object("json_schema")
    if described is None:
        form.refuse("json_schema", None, "an object with name and schema")
    described.labels("name", "description")
    described.flag("strict")  # every schema is followed strictly
    schema = described.take("schema", "a JSON schema", lambda v: isinstance(v, dict), required=True)
    described.end()
    return schema


def _logit_bias(f: Fields, name: str) -> dict[int, float] | None:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and len(value) <= MOST_BIASES
            and all(len(i) < 10 and i.isascii() and i.isdigit() and i == str(int(i)) for i in value)
            and all(isinstance(b, int | float) and not isinstance(b, bool) and abs(b) <= 100 for b in value.values())
        )

    supported = f"an object of at most {MOST_BIASES} token ids with numbers from -100 to 100"
    value = f.take(name, supported, fits)
    return None if value is None else {int(i): float(b) for i, b in value.items()}


def _ids(f: Fields, name: str) -> list[int]:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= MOST_STOPS and all(is_integer(i) and i >= 0 for i in value)

    return f.take(name, f"a list of at most {MOST_STOPS} token ids", fits) or []


def _seed(f: Fields, name: str) -> int | None:
    seed = f.integer(name, -(2**63), 2**64 - 1)
    return None if seed in (None, -1) else seed % 2**64


def _number(low: float, high: float) -> Callable[[Fields, str], float | None]:
    return lambda f, name: f.number(name, low, high)


def _integer(low: int, high: int) -> Callable[[Fields, str], int | None]:
    return lambda f, name: f.integer(name, low, high)


_READERS: dict[str, Callable[[Fields, str], Any]] = {
    "temperature": _number(0, 2),
    "top_k": _integer(-1, 1 << 30),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _logit_bias,
    "seed": _seed,
    "stop": lambda f, name: f.strings(name, MOST_STOPS, LONGEST_STOP),
    "stop_token_ids": _ids,
    "ignore_eos": lambda f, name: f.flag(name),
    "min_tokens": _integer(0, MOST_TOKENS),
    "skip_special_tokens": lambda f, name: f.lacks(name) or f.flag(name),
}
"""What takes each of the fields that SamplingParams knows by the same name."""
