"""Many calls on one model, in one thread and in several: each gets the text that it gets alone."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nibblelm import LLM, SamplingParams, StreamPiece
from nibblelm.engine_core import Engine, Handle
from nibblelm.errors import EngineError, RequestError
from nibblelm.pages import PAGE
from nibblelm.readers import BACKLOG, Channel, collect
from nibblelm.request import Request
from nibblelm.runner import Runner
from nibblelm.scheduler import Scheduler

PROMPTS = ["Once upon a time", "The dog", "Lily and Ben went to the park. They", "A", "One day, a big red ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PATIENCE_S = 300  # only ends what hangs
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Path:
    return data_dir / "checkpoints" / "stories260K"


@pytest.fixture
def llm(stories: Path) -> LLM:
    return LLM(stories, device="cpu", dtype="fp32")


def ids_of(pieces: Iterator[StreamPiece]) -> list[int | None]:
    return [piece.token_id for piece in pieces]


def variants() -> list[tuple[str, SamplingParams]]:
    """Ten calls that differ in prompt, sampling and length."""
    sampled = [SamplingParams(seed=i, temperature=0.9, max_tokens=20 + i, ignore_eos=True) for i in range(5)]
    return [*((p, GREEDY) for p in PROMPTS), *zip(PROMPTS, sampled, strict=True)]


def test_ten_interleaved_streams_in_one_thread(llm: LLM) -> None:
    calls = variants()
    alone = [ids_of(llm.stream(prompt, params)) for prompt, params in calls]
    live = {i: llm.stream(prompt, params) for i, (prompt, params) in enumerate(calls)}
    got: list[list[int | None]] = [[] for _ in calls]
    while live:
        for i, stream in list(live.items()):
            piece = next(stream, None)
            if piece is None:
                del live[i]
            else:
                got[i].append(piece.token_id)
    assert got == alone


def test_a_batch_and_logits_in_the_middle_of_a_stream(llm: LLM) -> None:
    want = ids_of(llm.stream(PROMPTS[0], GREEDY))
    batch = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    stream = llm.stream(PROMPTS[0], GREEDY)
    got = [next(stream).token_id for _ in range(5)]
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == batch
    llm.logits([5, 6, 7])
    assert got + ids_of(stream) == want


def test_four_threads_of_fifty_generates(llm: LLM) -> None:
    calls = variants()
    alone = [llm.generate(prompt, params).token_ids for prompt, params in calls]

    def fifty(first: int) -> list[list[int]]:
        return [llm.generate(calls[i % 10][0], calls[i % 10][1]).token_ids for i in range(first, first + 50)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(fifty, range(4)))
    for first, got in enumerate(results):
        assert got == [alone[i % 10] for i in range(first, first + 50)]


def test_a_chat_that_is_read_after_another_call(llm: LLM) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    system = {"role": "system", "content": "You tell long stories about animals and children."}
    one, two = ([system, {"role": "user", "content": text}] for text in ("A cat.", "A dog."))
    want = [LLM(llm.folder, device="cpu", dtype="fp32") for _ in range(2)]
    for fresh in want:
        assert fresh.tokenizer is not None
        fresh.tokenizer.chat_template = TEMPLATE
    llm.chat(one, GREEDY)
    late = llm.stream_chat(two, GREEDY)
    llm.generate("Something else that overwrites what the cache holds of the system message", GREEDY)
    assert ids_of(late) == want[0].chat(two, GREEDY).token_ids
    assert llm.chat(one, GREEDY).token_ids == want[1].chat(one, GREEDY).token_ids


def test_parts_of_text_are_text_and_others_are_named(llm: LLM) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    asked = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]}]
    assert llm.encode_chat(asked) == llm.encode_chat([{"role": "user", "content": "a cat"}])
    for message, named in (
        ({"role": "user"}, r"messages\[0\].content has None"),
        ({"role": "user", "content": []}, r"content has \[\]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content has .*image_url"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, "content has {'type': 'text'"),
        ({"content": "a"}, r"messages\[0\].role is None"),
    ):
        with pytest.raises(RequestError, match=named):
            llm.chat([message])
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])


@pytest.mark.parametrize("messages", ["hi", ["hi"], None], ids=str)
def test_a_chat_of_no_messages_is_named(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages is .*supported: a list of"):
        llm.chat(messages)


def test_two_chats_in_turns_keep_their_caches(llm: LLM) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    subjects = ("a cat and a mouse who are friends", "a big dog and a bird")
    histories = [[{"role": "user", "content": f"Tell me about {subject}. " * 4}] for subject in subjects]
    streams = [llm.stream_chat(messages, GREEDY) for messages in histories]
    texts = ["", ""]
    for pieces in zip(*streams, strict=True):
        texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
    for messages, text in zip(histories, texts, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        asked = len(llm.encode_chat(messages[:1]))
        timings = llm.chat(messages, GREEDY).timings
        assert timings.prompt_tokens - timings.prefilled_tokens == asked // PAGE * PAGE > 0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true while the engine's thread goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def scheduler_of(llm: LLM) -> Scheduler:
    return llm.engine._core._scheduler


def idle(llm: LLM) -> bool:
    """Whether nothing runs or waits, and nobody holds a page."""
    s = scheduler_of(llm)
    return not s.running and not s.waiting and s.pool.available == s.pool.count


def request_of(llm: LLM, prompt: str, params: SamplingParams) -> Request:
    return llm.request(llm.encode(prompt), llm.resolve(params, {}))


def test_closed_dropped_and_unread_streams_free_their_pages(stories: Path) -> None:
    llm = LLM(stories, device="cpu", dtype="fp32", max_sequences=3)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    streams = [llm.stream("Once", long) for _ in range(20)]  # of which only three can run, and nobody reads on
    assert len({next(stream).token_id for stream in streams}) == 1
    streams[0].close()  # type: ignore[attr-defined]
    want = llm.generate("Once", GREEDY).token_ids
    assert ids_of(streams[7])[: len(want) - 1] == want[1:]
    del streams
    gc.collect()
    assert eventually(lambda: idle(llm))
    handle = llm.submit("Once", long)
    del handle
    gc.collect()
    assert eventually(lambda: idle(llm))


def test_more_that_generate_than_a_step_has_tokens_hold_up_no_prompt(stories: Path, llm: LLM) -> None:
    many = LLM(stories, device="cpu", dtype="fp32", max_sequences=140)
    handles = [
        many.submit([3 + n], SamplingParams(temperature=0, max_tokens=BACKLOG, ignore_eos=True)) for n in range(130)
    ]
    for handle in handles:
        next(handle.tokens())
    ids = llm.encode("Once upon a time there was")
    assert torch.equal(many.logits(ids), llm.logits(ids))
    assert many.generate("The dog", GREEDY).token_ids == llm.generate("The dog", GREEDY).token_ids
    assert [len(handle.result().output.token_ids) for handle in handles] == [BACKLOG] * len(handles)


def test_a_reader_who_does_not_read_is_not_written_to(llm: LLM) -> None:
    handle = llm.submit("Once", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert eventually(lambda: handle._channel.held)
    assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    assert handle._channel.items.qsize() == BACKLOG
    assert len(list(handle.tokens())) == 400


def test_a_small_pool_changes_nothing(stories: Path) -> None:
    """Pages for a tenth of what the calls would take together: sequences are preempted and computed again."""
    alone = LLM(stories, device="cpu", dtype="fp32")
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=200, ignore_eos=True)
    prompts = [f"{prompt} {i}" for i in range(4) for prompt in PROMPTS]
    want = [alone.generate(prompt, params).token_ids for prompt in prompts]
    small = LLM(stories, device="cpu", dtype="fp32", kv_memory=8 * PAGE * alone.kv_bytes_per_token)
    assert small.kv_pages == 8
    assert [output.token_ids for output in small.generate(prompts, params)] == want


def test_memory_for_keys_and_values_is_bounded_by_name(stories: Path) -> None:
    page = PAGE * LLM(stories, device="cpu", dtype="fp32").kv_bytes_per_token
    small = LLM(stories, device="cpu", dtype="fp32", kv_memory=2 * page + 1)
    assert small.max_context == 2 * PAGE
    output = small.generate("Once", max_tokens=-1, ignore_eos=True)
    assert (output.limit, output.timings.prompt_tokens + len(output.token_ids)) == ("context", 2 * PAGE)
    with pytest.raises(RequestError, match="no room"):
        small.generate([5] * 2 * PAGE)
    with pytest.raises(RequestError, match=r"hold 128 tokens .* hold the context of 200.*--kv-memory"):
        LLM(stories, device="cpu", dtype="fp32", kv_memory=2 * page, max_context=200)
    with pytest.raises(RequestError, match="hold 0 tokens"):
        LLM(stories, device="cpu", dtype="fp32", kv_memory=100)
    with pytest.raises(RequestError, match="kv_memory is 0"):
        LLM(stories, device="cpu", dtype="fp32", kv_memory=0)


def test_too_many_requests_are_refused_one_by_one(llm: LLM) -> None:
    engine = Engine(llm.runner, Scheduler(2, 16, (64, 32)), most=3)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    handles = [engine.add(request_of(llm, "Once", long)) for _ in range(3)]  # unread, so they do not end
    with pytest.raises(RequestError, match="3 requests are unfinished"):
        engine.add(request_of(llm, "Once", GREEDY))
    assert [len(list(handle.tokens())) for handle in handles] == [400] * 3
    assert len(engine.add(request_of(llm, "Once", GREEDY), stream=False).result().output.token_ids) == 24
    engine.close()


def test_what_has_ended_takes_no_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the last piece may enter as many requests as there may be, and finds all pages free."""
    seen: list[tuple[int, bool]] = []
    put = Channel.put

    def watched(channel: Channel, item: Any, last: bool = False) -> None:
        if last:
            seen.append((llm.engine.unfinished, idle(llm)))
        put(channel, item, last)

    monkeypatch.setattr(Channel, "put", watched)
    llm.generate("Once", GREEDY)
    llm.logits([1, 2])
    monkeypatch.setattr(Request, "accept", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate("Once", GREEDY)
    assert seen == [(0, True)] * 3


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: Python passes over an interrupt in a callback of one, and hypothesis has such."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt_ends_the_call_that_waits_and_no_other(llm: LLM) -> None:
    want = llm.generate(PROMPTS[0], GREEDY).token_ids
    other = llm.stream(PROMPTS[0], GREEDY)
    got = [next(other).token_id]
    long = SamplingParams(temperature=1, max_tokens=480, ignore_eos=True)

    def interrupt() -> None:
        if eventually(lambda: len(scheduler_of(llm).waiting) > 100):
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted() -> None:
        threading.Thread(target=interrupt).start()
        llm.generate(["Once"] * 2000, long)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert eventually(lambda: not scheduler_of(llm).waiting)
    assert llm.generate(PROMPTS[0], GREEDY).token_ids == want
    assert got + ids_of(other) == want
    assert eventually(lambda: idle(llm))


def test_a_thread_that_cannot_start_is_an_error_and_the_next_call_tries_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineError, match="no thread for the engine: can't start new thread"):
            llm.generate("Once", max_tokens=4)
    assert llm.generate("Once", max_tokens=4).text
    llm.close()


def test_torch_in_other_threads_is_left_alone(llm: LLM) -> None:
    """Its number of threads is that of each thread which asks, also while tokens are drawn."""

    def seen() -> int:
        torch.ones(4).add(1)  # a thread's first op
        return torch.get_num_threads()

    def in_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(seen).result()

    want, stream = in_a_new_thread(), llm.stream("Once", max_tokens=100, temperature=1.0, seed=1)
    assert {in_a_new_thread() for _ in stream} == {want}


def test_a_failed_step_ends_every_request_and_the_engine_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    handle = llm.submit("Once", SamplingParams(max_tokens=400, ignore_eos=True))
    next(handle.tokens())

    def broken(*_: object) -> None:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(Runner, "decode", broken)
    for stream in streams:
        with pytest.raises(EngineError, match="step failed with RuntimeError: illegal instruction"):
            list(stream)
    with pytest.raises(EngineError, match="illegal instruction"):
        list(handle.tokens())
    for call in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.logits([1, 2]), lambda: llm.generate("Once")):
        with pytest.raises(EngineError, match="load the model again"):
            call()
    llm.close()


@pytest.mark.parametrize("place", [(Scheduler, "add"), (Scheduler, "remove"), (Channel, "put")], ids=str)
def test_nobody_waits_for_an_engine_that_ends_over_a_request(
    place: tuple[Any, str], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fails to enter one, to take back what it had, or to hand out its last piece."""
    method = getattr(*place)

    def broken(self: Any, what: Any, last: bool = True) -> None:
        if last and not isinstance(what, EngineError):
            raise MemoryError("no room")
        method(self, what, last)  # of `put` alone: of a piece before the last, of the error that tells of the failure

    monkeypatch.setattr(*place, broken)
    with pytest.raises(EngineError, match="no room"):
        llm.generate("Once", GREEDY)
    assert (llm.engine.unfinished, llm.engine.stats.stalled_s) == (0, 0.0)


def test_close_ends_what_is_unfinished(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    llm.close()
    assert (llm.engine.unfinished, llm.engine.stats.stalled_s, llm.engine.stats.finished["error"]) == (0, 0.0, 1)
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("Once")
    llm.close()


def test_the_thread_ends_with_the_model(stories: Path) -> None:
    llm = LLM(stories, device="cpu", dtype="fp32")
    stream = llm.stream("Once", GREEDY)
    next(stream)
    thread = llm.engine._thread
    assert thread is not None
    del llm
    gc.collect()
    assert thread.is_alive()  # the stream has the model
    del stream
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("graph", [True, False])
def test_a_dropped_model_gives_its_memory_back_at_once(graph: bool, stories: Path) -> None:
    """Without a garbage collection, which may be long in coming: the next model may need that memory."""
    llm = LLM(stories, device="cpu", graph=graph, speculate="ngram")
    llm.generate(["Once upon", "One"], max_tokens=30)
    llm.logits([1, 2, 3])
    next(llm.stream("Once", GREEDY))
    runner = llm.runner
    held = [weakref.ref(each) for each in (llm.engine, runner, runner.model, runner.cache.keys[0], runner.cache.tables)]
    del llm, runner
    assert [each() for each in held] == [None] * len(held)


@pytest.mark.parametrize("ending", ["pass", "sys.exit(7)", "raise ValueError", "os.kill(os.getpid(), signal.SIGINT)"])
def test_the_interpreter_exits_in_the_middle_of_a_stream(ending: str, stories: Path) -> None:
    code = f"""if True:
        import os, signal, sys
        from nibblelm import LLM
        llm = LLM({str(stories)!r}, device="cpu", dtype="fp32")
        streams = [llm.stream("Once", max_tokens=400, ignore_eos=True) for _ in range(3)]
        for stream in streams:
            next(stream)
        {ending}
    """
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == {"p": 0, "s": 7, "r": 1, "o": -signal.SIGINT}[ending[0]], result.stderr
    assert "nibblelm-engine" not in result.stderr


def test_streams_in_an_event_loop(llm: LLM) -> None:
    calls = variants()
    alone = [ids_of(llm.stream(prompt, params)) for prompt, params in calls]

    async def ids(prompt: str, params: SamplingParams) -> list[int | None]:
        return [piece.token_id async for piece in llm.submit(prompt, params)]

    async def some() -> int | None:
        pieces: AsyncIterator[StreamPiece] = aiter(llm.submit("Once", GREEDY))
        first = await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        return first.token_id

    async def everything() -> list[list[int | None]]:
        cancelled = asyncio.create_task(ids("Once", SamplingParams(max_tokens=480, ignore_eos=True)))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await some()
        return await asyncio.gather(*(ids(prompt, params) for prompt, params in calls))

    assert asyncio.run(everything()) == alone
    assert eventually(lambda: idle(llm))


def test_several_requests_are_read_together(llm: LLM) -> None:
    calls = variants()
    alone = [ids_of(llm.stream(prompt, params)) for prompt, params in calls]

    async def together() -> list[list[int | None]]:
        got: list[list[int | None]] = [[] for _ in calls]
        async for batch in collect([llm.submit(prompt, params) for prompt, params in calls]):
            for place, piece in batch:
                got[place].append(piece.token_id)
        return got

    assert asyncio.run(together()) == alone


def test_a_loop_that_is_closed_under_its_reader_frees_the_request(llm: LLM) -> None:
    async def read() -> None:
        async for _ in llm.submit("Once", SamplingParams(max_tokens=480, ignore_eos=True)):
            pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(read())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert not task.done()
    loop.close()
    del task, loop
    assert eventually(lambda: gc.collect() >= 0 and idle(llm))  # a task and what it waits for hold each other


def test_counters_say_what_was_done(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS * 2, GREEDY)
    stats = llm.engine.stats
    assert eventually(lambda: stats.idle)
    assert stats.stalled_s == 0
    assert stats.generated_tokens == sum(len(output.token_ids) for output in outputs)
    assert stats.prompt_tokens == sum(output.timings.prompt_tokens for output in outputs)
    assert stats.finished == {"stop": 0, "length": len(outputs), "error": 0, "abort": 0}
    assert sum(stats.first_token.counts) == sum(stats.end_to_end.counts) == len(outputs)
    assert sum(stats.inter_token.counts) == stats.generated_tokens - len(outputs)
    assert 0 < stats.steps <= stats.generated_tokens + len(outputs)


def test_an_abort_from_another_thread_ends_the_reader(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is computed, and nothing else would come."""
    decode, go_on = Runner.decode, threading.Event()

    def held(*args: Any) -> Any:
        go_on.wait(PATIENCE_S)
        return decode(*args)

    monkeypatch.setattr(Runner, "decode", held)
    handle = llm.submit("Once", SamplingParams(max_tokens=480, ignore_eos=True))
    pieces = handle.tokens()
    next(pieces)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(pieces))
        handle.abort()
        assert reading.result(PATIENCE_S) == []
    assert not go_on.is_set()
    go_on.set()
    assert eventually(lambda: idle(llm))


def test_a_stream_is_handed_from_thread_to_thread(llm: LLM) -> None:
    want = llm.generate("A", GREEDY).token_ids
    stream = llm.stream("A", GREEDY)
    with ThreadPoolExecutor(1) as first:
        got = [first.submit(lambda: next(stream).token_id).result()]
    with ThreadPoolExecutor(1) as second:
        got += second.submit(lambda: ids_of(stream)).result()
    assert got == want


def test_continuations_one_token_at_a_time(llm: LLM) -> None:
    """The text of each goes on from its prompt's, so that together they are the text of one call."""
    whole = llm.generate("Once", GREEDY)
    text, ids = "Once", llm.encode("Once")
    for token in whole.token_ids:
        output = llm.generate(ids, temperature=0, max_tokens=1, ignore_eos=True)
        text, ids = text + output.text, [*ids, token]
    assert text == "Once" + whole.text
    assert whole.text[0] == " "
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    assert llm.chat([{"role": "user", "content": "Once"}], GREEDY).text.startswith("upon a time")  # a text of its own


def test_several_readers_of_one_request_all_end(llm: LLM) -> None:
    handle = llm.submit(PROMPTS[0], GREEDY)
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda _: ids_of(handle.tokens()), range(3)))
    assert sorted(token for part in parts for token in part if token is not None) == sorted(
        llm.generate(PROMPTS[0], GREEDY).token_ids
    )
    assert handle.result() is handle.result()
    assert handle.result().output.token_ids == llm.generate(PROMPTS[0], GREEDY).token_ids
    aborted = llm.submit(PROMPTS[0], GREEDY)
    aborted.abort()
    with pytest.raises(RequestError, match="was aborted"):
        aborted.result()


def test_two_event_loops_tasks_on_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, decode = threading.Event(), Runner.decode

    def waiting(*args: Any) -> Any:  # else the first might have all of it before the second comes
        refused.wait(PATIENCE_S)
        return decode(*args)

    async def both() -> list[object]:
        handle = llm.submit(PROMPTS[0], GREEDY)

        async def read() -> list[int | None]:
            try:
                return [piece.token_id async for piece in handle]
            finally:
                refused.set()

        return await asyncio.wait_for(asyncio.gather(read(), read(), return_exceptions=True), PATIENCE_S)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", waiting)
        first, second = asyncio.run(both())
    assert isinstance(second, RequestError)
    assert "already" in str(second)
    assert first == llm.generate(PROMPTS[0], GREEDY).token_ids


def test_a_request_that_was_read_is_over(llm: LLM) -> None:
    handle = llm.submit(PROMPTS[0], GREEDY, min_tokens=None)

    async def read() -> int:
        return len([piece async for piece in handle])

    assert [asyncio.run(read()) for _ in range(3)] == [GREEDY.max_tokens, 0, 0]


def test_to_come_back_to_a_request_that_was_left_is_an_error(llm: LLM) -> None:
    """Leaving `async for` aborts it: an end without an error would look like a whole answer."""

    async def read(handle: Handle) -> None:
        async for _ in handle:
            break
        while not handle._ended:
            await asyncio.sleep(0.01)
        async for _ in handle:
            pass

    with pytest.raises(RequestError, match="was aborted"):
        asyncio.run(read(llm.submit("Once", max_tokens=200, ignore_eos=True)))  # more than may wait for a reader


def test_a_thread_and_an_event_loop_that_read_one_request_both_end(llm: LLM) -> None:
    """Whoever takes the last piece, the other is told."""
    for _ in range(200):
        handle = llm.submit("a", temperature=0, max_tokens=2, ignore_eos=True)
        thread = threading.Thread(target=lambda handle=handle: list(handle.tokens()))

        async def read(handle: Handle = handle, thread: threading.Thread = thread) -> None:
            thread.start()
            async with asyncio.timeout(PATIENCE_S):
                async for _ in handle:
                    pass

        asyncio.run(read())
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_requests_of_a_loop_that_is_gone_are_let_go(llm: LLM) -> None:
    """Closed in the middle of a stream, and collected, while the sequence sits out: nobody else would read it."""

    async def one_piece() -> None:
        async for _ in llm.submit(PROMPTS[0], temperature=0, max_tokens=200, ignore_eos=True):
            await asyncio.sleep(3600)

    async def all_pieces() -> None:
        async for _ in llm.submit(PROMPTS[1], GREEDY):
            pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(one_piece())
    loop.run_until_complete(asyncio.wait([task], timeout=0.05))
    assert eventually(lambda: any(s.parked for s in scheduler_of(llm).running))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del loop, task
    gc.collect()
    asyncio.run(all_pieces())
    gc.collect()
    assert eventually(lambda: not scheduler_of(llm).has_work and not scheduler_of(llm).running)


FORKED = """
import asyncio, os, sys
from nibblelm import LLM
from nibblelm.errors import EngineError
llm = LLM(sys.argv[1], device="cpu")
before = os.fork() == 0
text = llm.generate("Once", temperature=0, max_tokens=4).text  # in both processes: the thread begins here
if before:
    print(text, flush=True)
    os._exit(0)
os.wait()
handle = llm.submit("Once", max_tokens=100, ignore_eos=True)
stream = llm.stream("Once", max_tokens=100, ignore_eos=True)
next(stream)

async def read():
    async for _ in handle:
        pass

if os.fork() == 0:
    for call in (
        lambda: llm.generate("Once"), lambda: list(stream), lambda: list(handle.tokens()), handle.result,
        lambda: asyncio.run(read()),
    ):
        try:
            call()
        except EngineError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
print(len(list(handle.tokens())) + len(list(stream)))
print(text)
"""


def test_a_process_that_was_forked(stories: Path) -> None:
    """Before the first call it computes for itself; later its engine's thread is not there, and it says so."""
    result = subprocess.run(
        [sys.executable, "-c", FORKED, str(stories)], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    first, *errors, pieces, last = result.stdout.splitlines()
    assert first == last
    assert len(errors) == 5
    assert all("forked" in error for error in errors)
    assert pieces == "199"
