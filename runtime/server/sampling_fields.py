"""The fields that /v1/completions and /v1/chat/completions share."""

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


def read_common(f: Fields, max_tokens: int | None, logprobs: int | None) -> Common:
    """Take the fields that both endpoints have; the two that they name differently are passed in."""
    guided = _guided(f)
    stream = f.flag("stream")
    stream_options = f.object("stream_options")
    if stream_options is not None and not stream:
        f.refuse("stream_options", {}, "nothing without stream")
    usage = stream_options is not None and stream_options.flag("include_usage")
    if stream_options is not None:
        stream_options.end()
    f.labels("user", "safety_identifier", "prompt_cache_key", "metadata")
    f.choice("store", False)
    f.choice("service_tier", "auto", "default")
    n = f.integer("n", 1, MOST_OUTPUTS) or 1
    seed = f.integer("seed", -(2**63), 2**64 - 1)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=f.number("temperature", 0, 2),
        top_k=f.integer("top_k", 0, 1 << 30),
        top_p=f.number("top_p", 0, 1),
        min_p=f.number("min_p", 0, 1),
        repetition_penalty=f.number("repetition_penalty", 0.01, 100),
        presence_penalty=f.number("presence_penalty", -2, 2),
        frequency_penalty=f.number("frequency_penalty", -2, 2),
        logit_bias=_logit_bias(f),
        seed=None if seed is None else seed % 2**64,
        stop=f.strings("stop", MOST_STOPS, LONGEST_STOP),
        stop_token_ids=_ids(f, "stop_token_ids", MOST_STOPS),
        ignore_eos=_ignore_eos(f, bool(guided)),
        min_tokens=_min_tokens(f, bool(guided)),
        skip_special_tokens=f.take("skip_special_tokens", "true or false", lambda v: isinstance(v, bool)) is not False,
        logprobs=logprobs,
        **guided,
    )
    return Common(params, n, stream, usage, bool(guided))


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
        f.refuse("response_format", sorted(given), "one of response_format, regex and grammar")
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


def _ignore_eos(f: Fields, guided: bool) -> bool:
    wanted = f.flag("ignore_eos")
    if wanted and guided:
        f.refuse("ignore_eos", True, "false where the answer follows a schema, which ends it")
    return wanted


def _min_tokens(f: Fields, guided: bool) -> int:
    wanted = f.integer("min_tokens", 0, MOST_TOKENS) or 0
    if wanted and guided:
        f.refuse("min_tokens", wanted, "0 where the answer follows a schema, which may have to end before")
    return wanted


def _logit_bias(f: Fields) -> dict[int, float] | None:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and len(value) <= MOST_BIASES
            and all(i.isascii() and i.isdigit() and len(i) < 10 for i in value)
            and all(isinstance(b, int | float) and not isinstance(b, bool) and abs(b) <= 100 for b in value.values())
        )

    supported = f"an object of at most {MOST_BIASES} token ids with numbers from -100 to 100"
    value = f.take("logit_bias", supported, fits)
    return None if value is None else {int(i): float(b) for i, b in value.items()}


def _ids(f: Fields, name: str, most: int) -> list[int]:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and all(is_integer(i) and i >= 0 for i in value)

    return f.take(name, f"a list of at most {most} token ids", fits) or []
