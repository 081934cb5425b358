"""Many calls on one model, in one thread and in several: each gets the text that it gets alone."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nibblelm import LLM, SamplingParams, StreamPiece
from nibblelm import runner as runner_module
from nibblelm.errors import DeviceError, RequestError
from nibblelm.runner_pool import MAX_CALLS

PROMPTS = ["Once upon a time", "The dog", "Lily and Ben went to the park. They", "A", "One day, a big red ball"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
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


def test_two_chats_in_turns_keep_their_caches(llm: LLM) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    histories = [[{"role": "user", "content": text}] for text in ("Tell me about a cat.", "Sing of a big dog.")]
    streams = [llm.stream_chat(messages, GREEDY) for messages in histories]
    texts = ["", ""]
    for pieces in zip(*streams, strict=True):
        texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
    for messages, text in zip(histories, texts, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        timings = llm.chat(messages, GREEDY).timings
        assert timings.prefilled_tokens < timings.prompt_tokens / 2


def test_closed_and_dropped_streams_give_their_cache_back(llm: LLM) -> None:
    streams = [llm.stream("Once", GREEDY) for _ in range(MAX_CALLS + 5)]
    for stream in streams[:MAX_CALLS]:
        next(stream)
    with pytest.raises(RequestError, match=r"16 streams or calls .*close\(\)"):
        next(streams[MAX_CALLS])
    with pytest.raises(RequestError, match="16"):
        llm.logits([1, 2])
    streams[0].close()  # type: ignore[attr-defined]
    assert next(streams[MAX_CALLS + 1]).token_id is not None
    with pytest.raises(RequestError, match="16"):
        llm.generate("Once", GREEDY)
    del streams[1]
    gc.collect()
    assert len(llm.generate("Once", GREEDY).token_ids) == 24


def test_other_threads_wait_for_a_free_cache(llm: LLM) -> None:
    want = llm.generate(PROMPTS[0], GREEDY).token_ids
    streams = [llm.stream("Once", GREEDY) for _ in range(MAX_CALLS)]
    for stream in streams:
        next(stream)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(llm.generate(PROMPTS[0], GREEDY).token_ids))
    thread.start()
    time.sleep(0.1)
    assert got == []
    list(streams[3])
    thread.join(30)
    assert got == [want]


def test_an_interrupt_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate(PROMPTS[0], GREEDY).token_ids
    other = llm.stream(PROMPTS[0], GREEDY)
    got = [next(other).token_id]
    with monkeypatch.context() as patch:
        patch.setattr(runner_module.Runner, "decode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("The", GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY).token_ids == want
    assert got + ids_of(other) == want


def test_a_device_with_room_for_two_caches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle caches make room; with live ones in the way other threads wait and the same thread gets the error."""

    def small(_: object, advice: str, cache: int) -> None:
        held = sum(len(runner.history) for runner in llm._pool.runners)
        if held + cache // (llm.kv_bytes_per_token * llm.max_context) > 2:
            raise DeviceError(f"too little memory. {advice}")

    monkeypatch.setattr(runner_module, "require_memory", small)
    want = [output.token_ids for output in llm.generate(PROMPTS[:2], GREEDY)]
    with pytest.raises(DeviceError, match="fewer prompts"):
        llm.generate(PROMPTS[:3], GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    assert [next(stream).token_id for stream in streams] == [ids[0] for ids in want]
    with pytest.raises(DeviceError, match="smaller context"):
        llm.generate("The", GREEDY)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.extend(o.token_ids for o in llm.generate(PROMPTS[:2], GREEDY)))
    thread.start()
    time.sleep(0.1)
    assert [ids_of(stream) for stream in streams] == [ids[1:] for ids in want]
    thread.join(30)
    assert got == want


def test_a_stream_that_is_handed_on_does_not_count_for_the_thread_that_made_it(llm: LLM) -> None:
    """Threads end and their numbers come back: a new one that holds no stream waits, and gets its text."""
    want, streams = llm.generate("A", GREEDY).token_ids, []

    def start() -> None:
        stream = llm.stream("A", GREEDY)
        streams.append((next(stream).token_id, stream))

    for _ in range(MAX_CALLS):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    found = []
    waiting = threading.Thread(target=lambda: found.append(llm.generate("A", GREEDY).token_ids))
    waiting.start()
    for first, stream in streams:
        assert [i for i in [first, *ids_of(stream)] if i is not None] == want
    waiting.join(timeout=60)
    assert found == [want]
