"""Answers that follow a schema: all of them validate, by jsonschema, and nobody else is disturbed."""

import json
import math
import random
import re
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from nibblelm import LLM, SamplingParams
from nibblelm.engine_core import Engine
from nibblelm.errors import RequestError, SchemaError
from nibblelm.scheduler import Scheduler
from nibblelm.structured import _Mark

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    return LLM(DEMO, device="cpu")


def schema_of(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are bounded: objects in objects, enums, arrays, numbers, texts with any character."""
    kind = rng.choice(("enum", "const", "integer", "boolean", "text", "object", "array") if depth else ("enum", "text"))
    match kind:
        case "enum":
            return {"enum": rng.sample(["red", "grün", "☀", 7, None, True, "a b"], 3)}
        case "const":
            return {"const": {"x": [1, "é"]}}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": rng.choice((0, 7, 1200))}
        case "boolean":
            return {"type": ["boolean", "null"]}
        case "text":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": 8}
        case "array":
            return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": 1, "maxItems": 3}
    names = rng.sample(["name", "größe", "tags", "x y"], rng.randrange(1, 4))
    properties = {name: schema_of(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_a_hundred_schemas_validate(llm: LLM) -> None:
    schemas = [schema_of(random.Random(seed)) for seed in range(100)]
    params = [
        SamplingParams(schema=schema, temperature=1, top_p=1, seed=seed, max_tokens=400)
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate([PROMPT] * 100, params)
    for schema, output in zip(schemas, outputs, strict=True):
        assert (output.finish_reason, output.error) == ("stop", None), (schema, output.text)
        jsonschema.validate(json.loads(output.text), schema)
    alone = [llm.generate(PROMPT, one).token_ids for one in params[:10]]
    assert alone == [output.token_ids for output in outputs[:10]]


def test_any_object_expressions_and_grammars(llm: LLM) -> None:
    sampled = dict(temperature=1, seed=3, max_tokens=60)
    as_text = llm.generate(PROMPT, schema='{"enum": ["yes", "no"]}', **sampled)
    assert json.loads(as_text.text) in ("yes", "no")
    date = llm.generate(PROMPT, regex="[0-9]{4}-[01][0-9]-[0-3][0-9]", **sampled)
    assert re.fullmatch("[0-9]{4}-[01][0-9]-[0-3][0-9]", date.text)
    sums = llm.generate(PROMPT, grammar='start: N ("+" N){2}\nN: /[0-9]{1,3}/', **sampled)
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){2}", sums.text)
    assert llm.generate(PROMPT, schema={"type": "object"}, **sampled).text.startswith("{")
    json.loads(llm.generate(PROMPT, schema=True, **{**sampled, "max_tokens": 400}).text)


def test_a_tokenizer_that_adds_and_drops_spaces(data_dir: Path) -> None:
    """What a schema leaves no choice about is not written as a text of its own."""
    llm = LLM(data_dir / "checkpoints" / "stories260K", device="cpu")
    for seed in range(20):
        schema = schema_of(random.Random(seed))
        output = llm.generate("Once", schema=schema, seed=seed, max_tokens=400)
        assert output.error is None
        jsonschema.validate(json.loads(output.text), schema)


def test_beside_penalties_bias_log_probabilities_and_streams(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
    options = dict(schema=schema, seed=5, repetition_penalty=1.5, frequency_penalty=1, logit_bias={7: 90}, top_k=40)
    want = llm.generate(PROMPT, **options)
    jsonschema.validate(json.loads(want.text), schema)
    scored = llm.generate(PROMPT, logprobs=2, **options)
    assert scored.token_ids == want.token_ids
    free = llm.logits(llm.encode(PROMPT))[-1].log_softmax(-1)
    assert scored.logprobs is not None
    assert scored.logprobs[0].logprob == pytest.approx(float(free[want.token_ids[0]]), abs=1e-4)  # before the mask
    assert "".join(piece.text for piece in llm.stream(PROMPT, SamplingParams(**options))) == want.text
    unfinished = llm.generate(PROMPT, max_tokens=2, **options)
    assert unfinished.finish_reason == "length"


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (dict(schema={"type": "strange"}), "Invalid type"),
    (dict(schema={"not": {}}), "Unimplemented keys"),
    (dict(schema="{"), "cannot be read"),
    (dict(schema={"enum": [f"x{i}" for i in range(20_000)]}), "at most 65536"),
    (dict(schema={"$ref": "http://localhost/schema"}), "cannot be followed"),
    (
        dict(schema={"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}),
        "cannot be followed",
    ),
    (dict(regex="["), "invalid regex"),
    (dict(grammar="start: nothing"), "unknown name"),
    (dict(grammar="start: start"), "cannot be followed"),
]


@pytest.mark.parametrize(("options", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_followed_fails_alone_and_soon(options: dict[str, Any], message: str, llm: LLM) -> None:
    want = llm.generate(PROMPT, temperature=0, max_tokens=8).text
    begun = time.process_time()
    with pytest.raises(SchemaError, match=re.escape(message)):
        llm.generate(PROMPT, max_tokens=8, **options)
    assert time.process_time() - begun < 5
    assert llm.generate(PROMPT, temperature=0, max_tokens=8).text == want


def test_expressions_that_look_costly_are_none(llm: LLM) -> None:
    begun = time.process_time()
    for regex in ("((a{1,999}){1,999}){1,999}b", "(.*a){30}", ".*a.{20}"):
        assert llm.generate(PROMPT, regex=regex, max_tokens=8, seed=1).error is None
    assert time.process_time() - begun < 5


def test_deep_schemas(llm: LLM) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match=r"no JSON value|characters|cannot be"):
        llm.generate(PROMPT, schema=deep)


@torch.inference_mode()  # as the engine's thread
def test_a_token_costs_at_most_0_3_ms_more(llm: LLM) -> None:
    """On a slow machine a third of a step: steps of one sequence, in processor time of the thread that computes them,
    each in the best of runs that compute the same, of which there are as many as other processes, which take caches
    and clock, make necessary; then the medians."""
    schemas = [
        {"type": "object"},
        {"type": "string", "minLength": 99},
        *(schema_of(random.Random(i)) for i in range(9)),
    ]

    def steps_s(**options: Any) -> list[float]:
        engine = Engine(llm.runner, Scheduler(1, 8, (512, 128)))
        engine._thread = threading.current_thread()
        core, spent = engine._core, list[float]()
        params = llm.resolve(SamplingParams(temperature=1, max_tokens=99, **options), {})
        handle = engine.add(llm.request(llm.encode(PROMPT), params), stream=False)
        core.heard(wait=False)
        while core._scheduler.has_work:
            begun = time.thread_time()
            core.step()
            spent.append(time.thread_time() - begun)
        assert handle.result().output.error is None
        return spent[1:]  # the first is the prompt's

    loads: list[list[dict[str, Any]]] = [
        [dict(schema=schema, seed=seed) for seed, schema in enumerate(schemas)],
        [dict(ignore_eos=True, seed=seed) for seed in range(4)],
    ]
    guided, free, more, most = list[float](), list[float](), math.inf, 0.0
    for run in range(20):
        once = [[s for options in load for s in steps_s(**options)] for load in loads]
        guided, free = once if run == 0 else (list(map(min, *each)) for each in zip((guided, free), once, strict=True))
        more, most = statistics.median(guided) - statistics.median(free), max(0.3e-3, statistics.median(free) / 3)
        if more < most:
            break
    print(f"{len(guided)} tokens: {1e3 * more:.3f} ms more than {1e3 * statistics.median(free):.3f} ms")
    assert len(guided) > 150
    assert more < most


def test_a_guide_that_fails_on_the_way_ends_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(schema={"type": "string", "minLength": 50}, seed=1)
    request, other = llm.request(llm.encode(PROMPT), llm.resolve(params, {})), llm.submit("The", max_tokens=30, seed=1)
    assert request.sampler.guide is not None

    def broken() -> None:
        raise SchemaError("too much")

    handle = llm.engine.add(request)
    stream = handle.tokens()
    next(stream)
    monkeypatch.setattr(request.sampler.guide, "mask", broken)
    *_, last = stream
    output = last.output
    assert (output.finish_reason, output.error, output.error_type) == ("error", "too much", "SchemaError")
    assert len(other.result().output.token_ids) == 30


def test_a_guide_that_fails_alone_raises_its_own_error(llm: LLM) -> None:
    """As in a list, whose output has its name."""
    for options in ({"regex": "("}, {"regex": "(a{1000}){1000}"}):
        with pytest.raises(SchemaError):
            llm.generate("A", max_tokens=5, **options)


def test_end_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "demo" / "stories-7m"
    shutil.copytree(demo, tmp_path / "model", copy_function=shutil.copyfile)
    path = tmp_path / "model" / "generation_config.json"
    settings = json.loads(path.read_text())
    for ends in ([99999, settings["eos_token_id"]], [99999]):
        path.write_text(json.dumps(settings | {"eos_token_id": ends}))
        llm = LLM(tmp_path / "model", device="cpu")
        if len(ends) > 1:
            assert llm.generate("x", schema={"type": "boolean"}).text.strip() in ("true", "false")
        else:
            with pytest.raises(SchemaError, match="an end token"):
                llm.generate("x", schema={"type": "boolean"})


def test_arguments(llm: LLM) -> None:
    for options, message in (
        (dict(schema=3), "schema is 3"),
        (dict(regex=3), "regex is 3"),
        (dict(regex="a", schema={}), "one of schema, regex and grammar"),
        (dict(regex="a", ignore_eos=True), "ignore_eos is True"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, **options)


def test_an_answer_that_is_free_up_to_a_mark(llm: LLM) -> None:
    """Up to it nothing is held back but the end, behind it everything that the schema does not allow."""
    schema = {"enum": ["red", "grün"]}
    for mark, seeds in ((".", 8), ("the", 4), (" was", 4)):
        for seed in range(seeds):
            options: dict[str, Any] = dict(temperature=1, seed=seed, max_tokens=300)
            output = llm.generate(PROMPT, schema=schema, guided_after=mark, **options)
            thought, _, answer = output.text.partition(mark)
            assert output.finish_reason == "stop", output
            assert json.loads(answer) in schema["enum"], output.text
            free = llm.generate(PROMPT, **options).text.partition(mark)
            assert thought == free[0] or len(thought) > len(free[0]), (thought, free[0])
            assert thought == free[0] or not free[0].startswith(thought)
    batch = llm.generate([PROMPT] * 4, [SamplingParams(regex="[ab]{3}", guided_after=".", **options)] * 4)
    assert {re.fullmatch(r"[ab]{3}", one.text.partition(".")[2]) is not None for one in batch} == {True}
    cut = llm.generate(PROMPT, schema=schema, guided_after="</think>", temperature=0, max_tokens=30)
    assert cut.finish_reason == "length"
    assert cut.text == llm.generate(PROMPT, temperature=0, max_tokens=30, ignore_eos=True).text
    for given in (
        {"guided_after": "\ud800", "regex": "a"},
        {"guided_after": "x"},
        {"guided_after": "", "regex": "a"},
        {"guided_after": 5, "regex": "a"},
    ):
        with pytest.raises(RequestError, match=r"guided_after is .* beside a schema, a regex or a grammar"):
            SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["</think>", "x", "aab", "\n#\n"])
def test_a_mark_ends_with_its_token_or_line_ends(text: str) -> None:
    """Against the definition, for every way to cut a text with the mark into a few tokens."""
    tokens = [
        b"",
        b"\n",
        b"a",
        b"aa",
        b"b\n\n",
        b"b",
        b"bx",
        b"x",
        b"<",
        b"</th",
        b"ink>\n",
        b"ink>",
        b"ink>{",
        b"n#\n",
    ]
    tokens += [
        b"</think>\n",
        b"</think>x",
        b"<</thi",
        b"nk>",
        b"nk></think>",
        b"x\n\n",
        b"xx",
        b"#",
        b"\n#",
        b"\n#\n\n",
        b"#\nx",
    ]
    mark, data = _Mark(text.encode(), tokens, [0]), text.encode()
    rng = random.Random(0)
    ended = 0
    for _ in range(3000):
        come, end = b"", b""
        for _ in range(12):
            bits = np.unpackbits(mark.mask(end).view(np.uint8), bitorder="little")
            may = [i for i in range(len(tokens)) if bits[i]]
            rests = [(come + token).partition(data) for token in tokens]
            assert may == [i for i in range(1, len(tokens)) if not rests[i][2].strip(b"\n")], (come, may)
            token = rng.choice(may)
            come, end = come + tokens[token], mark.end_with(end, token)
            assert (end == data) == (data in come), (come, end)
            if data in come:
                ended += 1
                break
    assert ended > 100
