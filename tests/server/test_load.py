"""Under load: every answer is what it is alone, and requests that make no sense harm nobody."""

import asyncio
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from nibblelm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from bad_requests import bad_request, status_of
from waiting import PATIENCE_S, wait_for

REQUESTS, KINDS, CONCURRENCY = 200, 40, 64
BAD = 500
WORDS = ["the dog", "a little girl", "Lily", "the sea ☀", "one day", "\n", "was very", "happy", ".", "Ben ran"]


def kinds() -> list[tuple[bool, Any, dict[str, Any]]]:
    """(chat, prompt, sampling): prompts that share beginnings of a page and more, in all kinds of sampling."""
    rng = random.Random(5)
    bases = [" ".join(rng.choices(WORDS, k=90)) for _ in range(3)]
    sampling: list[dict[str, Any]] = [
        dict(temperature=0),
        dict(temperature=1.0, top_p=1.0),
        dict(temperature=0.8, top_p=0.9, top_k=50),
        dict(temperature=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
        dict(temperature=0.7, logprobs=2),
        dict(temperature=0.9, stop=["was", "."]),
        dict(temperature=1.0, logit_bias={5: 4.0, 9: -100.0}, min_tokens=10),
    ]
    made = []
    for i in range(KINDS):
        prompt = rng.choice(bases)[: rng.choice((40, 250, 400))] + " ".join(rng.choices(WORDS, k=rng.randrange(4)))
        options = sampling[i % len(sampling)] | dict(seed=i, max_tokens=rng.choice((3, 20, 60)))
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
        made.append((i % 3 == 0, prompt, options))
    return made


def alone(llm: LLM, chat: bool, prompt: str, options: dict[str, Any]) -> tuple[str, list[float]]:
    params = SamplingParams(**options)
    output = llm.chat([{"role": "user", "content": prompt}], params) if chat else llm.generate(prompt, params)
    return output.text, [one.logprob or 0.0 for one in output.logprobs or []]


async def asked(
    client: openai.AsyncOpenAI, chat: bool, prompt: str, options: dict[str, Any], stream: bool
) -> tuple[str, list[float]]:
    known = (
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "seed",
        "max_tokens",
        "logit_bias",
    )
    given: dict[str, Any] = {name: options[name] for name in known if name in options}
    given["extra_body"] = {name: options[name] for name in options if name not in (*known, "logprobs")}
    text, scores = "", []
    if chat:
        given |= dict(logprobs=True, top_logprobs=2) if "logprobs" in options else {}
        messages: Any = [{"role": "user", "content": prompt}]
        answer: Any = await client.chat.completions.create(model="demo", messages=messages, stream=stream, **given)
    else:
        given |= dict(logprobs=2) if "logprobs" in options else {}
        answer = await client.completions.create(model="demo", prompt=prompt, stream=stream, **given)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    for chunk in chunks:
        (choice,) = chunk.choices
        if chat:
            text += (choice.delta if stream else choice.message).content or ""
            scores += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
        else:
            text += choice.text
            scores += choice.logprobs.token_logprobs if choice.logprobs else []
    return text, scores


def idle(server: Any) -> bool:
    """Nothing is computed, and every page has come back."""
    seen = server.metrics()
    return seen["num_requests_running"] == seen["num_requests_waiting"] == seen["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_every_answer_is_what_it_is_alone(drafts: bool, serving: Any, folder: Path, llm: LLM) -> None:
    """With prompts' pages shared, and too few pages for all that run; with drafts, for which they are few at a time."""
    few = ("--max-sequences", "4", "--speculate", "ngram") if drafts else ()
    server = serving(folder, "--served-model-name", "demo", "--kv-memory", "1200K", *few)
    requests = kinds()
    want = [alone(llm, *request) for request in requests]
    order = random.Random(6).choices(range(KINDS), k=REQUESTS)

    async def everything() -> list[tuple[str, list[float]]]:
        room = asyncio.Semaphore(CONCURRENCY)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(place: int, kind: int) -> tuple[str, list[float]]:
                async with room:
                    return await asked(client, *requests[kind], stream=place % 2 == 0)

            return await asyncio.gather(*(one(place, kind) for place, kind in enumerate(order)))

    for kind, got in zip(order, asyncio.run(everything()), strict=True):
        assert got == want[kind], requests[kind]
    assert wait_for(lambda: idle(server))
    seen = server.metrics()
    assert seen["num_preemptions_total"] > 0
    assert seen["prefix_cache_hits_total"] > 1000
    assert (seen["spec_decode_num_drafts_total"] > 0) == drafts
    drafted, accepted = (seen[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    assert drafted > accepted > 0 or not drafts


@pytest.mark.slow
def test_requests_that_make_no_sense(serving: Any, folder: Path) -> None:
    server = serving(folder)
    rng = random.Random(7)
    bad = [bad_request(rng) for _ in range(BAD)]

    def send(requests: list[tuple[bytes, bool]]) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda request: status_of(server.port, *request), requests))

    send(bad)  # what is made once is made
    before, begun_s = server.memory, server.cpu_s
    statuses = send(bad)
    assert server.cpu_s - begun_s < 60
    odd = [status for status in statuses if status != 0 and not 400 <= status < 500]
    assert set(odd) <= {200}  # a changed byte may leave a request that makes sense
    assert len(odd) < BAD / 20
    assert {0, 400, 404, 415} <= set(statuses)
    assert server.memory < before * 1.05
    assert server.request("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
    assert wait_for(lambda: idle(server))
    assert "Traceback" not in "".join(server.log)


def test_clients_that_leave_at_random(server: Any, llm: LLM) -> None:
    """Their pages come back, and those that stay get what they would get."""
    want = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40)).text
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}

    def leave(seed: int) -> None:
        rng = random.Random(seed)
        data = json.dumps(body | {"seed": seed, "stream": rng.random() < 0.7}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall((head % len(data)) + data[: rng.choice((len(data), len(data), 10))])
            time.sleep(rng.random() * 0.2)

    leaving = [threading.Thread(target=leave, args=[seed]) for seed in range(60)]
    for thread in leaving:
        thread.start()
    for _ in range(3):
        answer = server.request(
            "POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
        )
        assert answer[1]["choices"][0]["text"] == want
    for thread in leaving:
        thread.join()
    assert wait_for(lambda: idle(server))
