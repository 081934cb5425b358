"""The scheduler against a simulated device whose pages remember what was written: no model, every schedule."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblelm.errors import RequestError
from nibblelm.pages import NO_PAGE, PAGE, PagePool
from nibblelm.scheduler import CROWD, PART, Chunk, Scheduler, Sequence, most_pages

Cell = tuple[int, int, str]
"""What a position of a page holds: its position in the sequence, the token, and the kernel that wrote it."""


class Device:
    """Pages of cells and page tables, and a model whose next token depends on every token before it."""

    def __init__(self, slots: int, pages: int, window: int = 0) -> None:
        self.cells: list[list[Cell | None]] = [[None] * PAGE for _ in range(pages)]
        self.window = window
        self.tables: list[dict[int, int]] = [{} for _ in range(slots)]
        self.computed = 0

    def write(self, s: Sequence, position: int, kernel: str) -> None:
        self.computed += 1
        page = self.tables[s.slot][position // PAGE]
        assert page != NO_PAGE
        self.cells[page][position % PAGE] = position, s.ids[position], kernel
        for p in range(max(position + 1 - self.window, 0) if self.window else 0, position + 1):  # what it attends to
            kernel = "prompt" if p < s.prompt else "generated"
            assert self.tables[s.slot][p // PAGE] != NO_PAGE
            assert self.cells[self.tables[s.slot][p // PAGE]][p % PAGE] == (p, s.ids[p], kernel)


def next_token(ids: Iterable[int]) -> int:
    return hash(tuple(ids)) % 1000


def expected(ids: list[int], limit: int) -> list[int]:
    ids = list(ids)
    while len(ids) < limit:
        ids.append(next_token(ids))
    return ids


def draft(scheduler: Scheduler, rng: random.Random) -> None:
    """Give sequences that generate drafts which are wrong somewhere, or right, or far too long."""
    for s in scheduler.running:
        if s.computed >= s.prompt and s.at_end and rng.random() < 0.7:
            length = len(s.ids)
            s.draft = expected(s.ids, length + rng.choice((1, 3, 8, 80)))[length:]
            if rng.random() < 0.7:
                s.draft[rng.randrange(len(s.draft))] = -1


def step(scheduler: Scheduler, device: Device, ahead: bool = False) -> list[Sequence]:
    """Compute one plan; returns the sequences that are finished."""
    plan = scheduler.plan()
    assert plan.decodes or plan.chunks, "there was work, and nothing is done"
    rows = sum(1 + len(s.draft) for s in plan.decodes)
    assert sum(c.last - c.first for c in plan.chunks) + rows <= max(scheduler._budget)
    members = [*plan.decodes, *(c.sequence for c in plan.chunks)]
    assert all(s.running and not s.parked for s in members)
    assert len({id(s) for s in members}) == len({s.slot for s in members}) == len(members)
    for s in plan.moved:
        device.tables[s.slot] = dict(enumerate(s.pages))
    for s in members:
        unseen = max((s.computed + 1 - device.window) // PAGE, 0) if device.window else 0
        assert [page == NO_PAGE for page in s.pages] == [i < unseen for i in range(len(s.pages))]
    finished = []
    for s in plan.decodes:
        assert s.prompt <= s.computed < len(s.ids)
        device.write(s, s.computed, "generated")
        if s.draft:
            s.ids += s.draft
            for i in range(len(s.draft)):
                device.write(s, s.computed + 1 + i, "generated")
            del s.ids[-len(s.draft) :]
        elif ahead and s.at_end and len(s.ids) + 1 < s.limit:  # a step that the device is ahead may write one more
            s.ids.append(next_token(s.ids))
            device.write(s, s.computed + 1, "generated")
            s.ids.pop()
        scheduler.advance(s, s.computed + 1)
        while s.draft and s.draft.pop(0) == next_token(s.ids):
            s.ids.append(next_token(s.ids))
            scheduler.advance(s, s.computed + 1)
        s.draft = []
    for c in plan.chunks:
        s = c.sequence
        assert (c.first, c.last <= s.prompt, c.last > c.first) == (s.computed, True, True)
        for position in range(c.first, c.last):
            device.write(s, position, "prompt")
        scheduler.advance(s, c.last)
    for s in members:
        if s.computed == len(s.ids):
            s.ids.append(next_token(s.ids))
            if len(s.ids) == s.limit:
                finished.append(s)
                scheduler.remove(s)
    return finished


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, tuple[int, int], int, list[tuple[int, list[int], int, int]]]:
    """Slots, pages, budgets, window, and (step of arrival, prompt, limit, share) of each request; prompts share
    beginnings, and with a window some have more tokens than there is room for at a time."""
    pages, window = draw(st.integers(1, 12)), draw(st.just(0) | st.integers(1, 200))
    most = 600 if window and most_pages(1, window) <= pages else pages * PAGE
    seeds = [draw(st.integers(0, 3)) for _ in range(3)]
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        base = random.Random(draw(st.sampled_from(seeds)))
        length = draw(st.integers(1, min(most, 300 if most != 600 else 500)))
        prompt = [base.randrange(3) for _ in range(length)]
        if draw(st.booleans()):
            prompt[draw(st.integers(0, length - 1))] = 7
        limit = min(length + draw(st.integers(1, 150)), most + 1)
        requests.append((draw(st.integers(0, 40)), prompt, limit, draw(st.sampled_from([0, 100, 1000]))))
    budget = draw(st.integers(8, 400)), draw(st.integers(8, 80))
    return draw(st.integers(1, 6)), pages, budget, window, requests


def test_every_schedule_computes_what_each_request_gets_alone(request: pytest.FixtureRequest) -> None:
    @settings(max_examples=3 * request.config.getoption("--schedules"))
    @given(workloads(), st.integers(0, 2**32), st.booleans(), st.booleans())
    def check(workload, seed: int, ahead: bool, drafts: bool) -> None:
        compute(workload, random.Random(seed), ahead, drafts)

    check()


def compute(workload, rng: random.Random, ahead: bool, drafts: bool) -> None:
    """All requests of a workload, with readers that fall behind and give up now and then."""
    slots, pages, budget, window, requests = workload
    scheduler, device = Scheduler(slots, pages, budget, window), Device(slots, pages, window)
    pending = sorted(requests, key=lambda r: r[0])
    live: dict[int, Sequence] = {}
    now, finished, aborted = 0, 0, 0
    while pending or live:
        while pending and pending[0][0] <= now:
            _, prompt, limit, share = pending.pop(0)
            s = Sequence(list(prompt), len(prompt), limit, share)
            scheduler.add(s)
            live[id(s)] = s
        for s in list(live.values()):
            if rng.random() < 0.02:
                scheduler.park(s)
            elif s.parked and rng.random() < 0.3:
                scheduler.resume(s)
            elif rng.random() < 0.003:
                scheduler.remove(s)
                del live[id(s)]
                aborted += 1
        if drafts:
            draft(scheduler, rng)
        if scheduler.has_work:
            for s in step(scheduler, device, ahead):
                assert s.ids == expected(s.ids[: s.prompt], s.limit)
                del live[id(s)]
                finished += 1
        held = [page for s in scheduler.running for page in s.pages if page != NO_PAGE]
        assert +Counter(scheduler.pool._held) == Counter(held)
        assert len(scheduler.running) <= slots
        assert scheduler.pool.available + len(set(held)) == pages
        assert [s.arrival for s in scheduler.running] == sorted(s.arrival for s in scheduler.running)
        now += 1
        assert now < 20_000, "requests that do not end"
    assert finished + aborted == len(requests)
    assert scheduler.pool.available == pages
    assert sorted(scheduler._slots) == list(range(slots))


def run(scheduler: Scheduler, device: Device) -> None:
    while scheduler.has_work:
        step(scheduler, device)


def test_outputs_of_one_prompt_compute_its_full_pages_once() -> None:
    scheduler, device = Scheduler(8, 40, (512, 128)), Device(8, 40)
    prompt = [random.Random(1).randrange(9) for _ in range(5 * PAGE + 3)]
    group = [Sequence(list(prompt), len(prompt), len(prompt) + 1) for _ in range(4)]
    for s in group:
        scheduler.add(s)
    run(scheduler, device)
    assert device.computed == 5 * PAGE + 4 * 3
    assert [s.ids for s in group] == [expected(prompt, len(prompt) + 1)] * 4


def test_the_last_prompt_token_is_always_computed() -> None:
    scheduler, device = Scheduler(1, 4, (512, 128)), Device(1, 4)
    for _ in range(2):
        scheduler.add(Sequence([1] * 2 * PAGE, 2 * PAGE, 2 * PAGE + 1))
        run(scheduler, device)
    assert device.computed == 2 * PAGE + PAGE


def test_generated_tokens_are_never_found() -> None:
    scheduler, device = Scheduler(1, 8, (512, 128)), Device(1, 8)
    scheduler.add(first := Sequence([1] * 10, 10, 3 * PAGE))
    run(scheduler, device)
    before = device.computed
    scheduler.add(Sequence(list(first.ids), len(first.ids), len(first.ids) + 1))
    run(scheduler, device)
    assert device.computed - before == len(first.ids)


def test_first_come_first_served_and_generating_comes_first() -> None:
    scheduler, device = Scheduler(4, 40, (100, 20)), Device(4, 40)
    sequences = [Sequence([n] * 150, 150, 200) for n in range(3)]
    for s in sequences:
        scheduler.add(s)
    assert [(c.sequence, c.first, c.last) for c in peek(scheduler, device)] == [(sequences[0], 0, 100)]
    second = peek(scheduler, device)
    assert [(c.sequence, c.first, c.last) for c in second] == [(sequences[0], 100, 150), (sequences[1], 0, 50)]
    plan = scheduler.plan()
    assert plan.decodes == [sequences[0]]
    assert [(c.first, c.last) for c in plan.chunks] == [(50, 69)]


def test_a_crowd_of_prompts_is_served_as_if_nobody_generated() -> None:
    scheduler, device = Scheduler(12, 80, (100, 20)), Device(12, 80)
    for n in range(2):
        scheduler.add(Sequence([n] * 10, 10, 200))
    peek(scheduler, device)
    for n in range(CROWD - 1):
        scheduler.add(Sequence([9, n] * 75, 150, 200))
    assert sum(c.last - c.first for c in scheduler.plan().chunks) == 20 - 2
    scheduler.add(Sequence([8] * 150, 150, 200))
    assert sum(c.last - c.first for c in scheduler.plan().chunks) == 100 - 2


def test_those_who_wait_for_a_slot_are_no_crowd() -> None:
    scheduler, device = Scheduler(3, 80, (100, 20)), Device(3, 80)
    for n in range(2):
        scheduler.add(Sequence([n] * 10, 10, 200))
    peek(scheduler, device)
    for n in range(2 * CROWD):
        scheduler.add(Sequence([9, n] * 75, 150, 200))
    assert sum(c.last - c.first for c in scheduler.plan().chunks) == 20 - 2


@pytest.mark.parametrize(
    ("generating", "prompt", "part"),
    [(2, 150, 150), (2, 1000, PART), (2, 4000, 500), (2, 8000, 640 - 2), (120, 1000, 240), (250, 1000, 640 - 250)],
)
def test_parts_of_a_prompt_beside_those_that_generate(generating: int, prompt: int, part: int) -> None:
    """As short as their tokens should wait, and as long as the prompt is: never over the budget."""
    scheduler, device = Scheduler(260, 1000, (8192, 640)), Device(260, 1000)
    for n in range(generating):
        scheduler.add(Sequence([n] * 10, 10, 200))
    peek(scheduler, device)
    scheduler.add(Sequence([9, 8] * (prompt // 2), prompt, prompt + 1))
    plan = scheduler.plan()
    assert len(plan.decodes) == generating
    assert sum(c.last - c.first for c in plan.chunks) == part


@pytest.mark.parametrize(("generating", "part"), [(10, 10), (18, 2), (20, 2), (45, 2)])
def test_however_many_generate_a_prompt_goes_on(generating: int, part: int) -> None:
    scheduler, device = Scheduler(50, 1000, (100, 20)), Device(50, 1000)
    for n in range(generating):
        scheduler.add(Sequence([n] * 3, 3, 200))
    while len(scheduler.waiting) + sum(s.computed < s.prompt for s in scheduler.running):
        peek(scheduler, device)
    scheduler.add(Sequence([9, 8] * 20, 40, 41))
    (chunk,) = scheduler.plan().chunks
    assert (chunk.first, chunk.last) == (0, part)


def peek(scheduler: Scheduler, device: Device) -> list[Chunk]:
    plan = scheduler.plan()
    for s in plan.moved:
        device.tables[s.slot] = dict(enumerate(s.pages))
    for c in plan.chunks:
        scheduler.advance(c.sequence, c.last)
        if c.last == c.sequence.prompt:
            c.sequence.ids.append(5)
    return plan.chunks


def test_pages_unused_for_longest_go_first_and_ends_before_beginnings() -> None:
    pool = PagePool(3)
    a, b, c = (pool.take() for _ in range(3))
    assert a is not None
    assert b is not None
    assert c is not None
    chain = pool.publish(a, 0, [1])
    pool.publish(b, chain, [2])
    pool.publish(c, 0, [3])
    pool.release([c])
    pool.release([a, b])
    assert pool.find(0, [1]) == (a, chain)  # held again
    pool.release([a])
    assert [pool.take() for _ in range(4)] == [c, b, a, None]


def test_equal_pages_after_different_beginnings_are_different() -> None:
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    chain = pool.publish(first, 0, [1, 2])
    pool.publish(second, chain, [5, 6])
    assert pool.find(0, [5, 6]) is None
    assert pool.find(chain + 7, [5, 6]) is None
    assert pool.find(chain, [5, 6]) is not None


def test_a_window_has_its_pages_alone() -> None:
    """One sequence of ten times what the pool holds, in a prompt and in what is generated."""
    window = 2 * PAGE + 5
    pages = most_pages(1, window)
    scheduler, device = Scheduler(2, pages, (512, 128), window), Device(2, pages, window)
    scheduler.add(s := Sequence([1] * 20 * PAGE, 20 * PAGE, 40 * PAGE))
    run(scheduler, device)
    assert s.ids == expected([1] * 20 * PAGE, 40 * PAGE)
    assert device.computed == len(s.ids) - 1
    assert scheduler.preemptions == 0
    with pytest.raises(RequestError, match="holds"):
        Scheduler(2, pages - 1, (512, 128), window).add(s)


def test_pages_before_a_window_are_still_found() -> None:
    """By a second request while the first generates, and by a third after both; what nobody has then is written over
    only when there is no other page."""
    scheduler, device = Scheduler(2, 20, (512, 128), PAGE), Device(2, 20, PAGE)
    prompt = [random.Random(2).randrange(9) for _ in range(6 * PAGE + 1)]
    scheduler.add(first := Sequence(list(prompt), len(prompt), len(prompt) + 3 * PAGE))
    while first.computed < len(prompt) + 2 * PAGE:
        step(scheduler, device)
    assert first.dropped == 7
    for _ in range(2):
        before = device.computed
        scheduler.add(again := Sequence(list(prompt), len(prompt), len(prompt) + 1))
        while len(again.ids) == len(prompt):
            step(scheduler, device)
        assert again.ids == first.ids[: len(again.ids)]
        assert device.computed - before <= 2
        run(scheduler, device)


def test_a_request_that_could_never_run_is_refused() -> None:
    scheduler = Scheduler(2, 2, (512, 128))
    with pytest.raises(RequestError, match=r"130 tokens.* holds 128.*--kv-memory"):
        scheduler.add(Sequence([1] * 10, 10, 2 * PAGE + 2))
    scheduler.add(Sequence([1] * 10, 10, 2 * PAGE + 1))
