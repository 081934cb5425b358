"""What each step computes, for which sequences, in which pages. Plain Python: no model and no device.

A sequence has tokens that it wants (its prompt, then what was generated) and tokens that are computed, whose keys and
values are in its pages. That covers a prompt cut in chunks, one whose beginning is found in pages of others, and one
that was preempted: it wants what it wanted, and nothing is computed. Prompt tokens are computed in chunks, generated
tokens one at a time, also when they are computed again, but for a draft: tokens that may come next, computed in the
same step. They are no part of the sequence; what those that turn out wrong left in its pages is written over.

First come, first served: in each step every sequence that generates comes first, oldest first, then prompts fill the
budget. When pages run out, a sequence whose reader sits out gives up its own, then the newest does. The oldest that is
not held up by its reader can take every page it needs, so something always goes on.

With a window a sequence gives back the pages that no later token of it sees; others may have them still, or find them.
One that was preempted begins anew, with pages for its beginning.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from nibblelm.errors import RequestError
from nibblelm.pages import NO_PAGE, PAGE, ROOT, PagePool, page_count

AHEAD = 2
"""Positions beyond the one to be computed that a generating sequence has pages for: a device runs a step ahead, and
where a prompt ends in that step, the one behind it is launched before either is planned."""

CROWD = 8
"""So many prompts are computed as if nobody waited for them. The sooner those sequences generate, the fuller are the
steps of all; and in small shares beside many that generate they would take longer, each share with a step of these."""

PART, PARTS = 192, 8
"""Of a prompt beside sequences that generate at least so many tokens are computed in a step, and at least such a part
of all: their tokens come as evenly as that allows, and a long prompt is not held up by many small steps."""

LEFT = 8
"""Such a part of a step's budget is for prompts, however many generate."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One output on its way.

    ids      the prompt and what was generated: the tokens wanted
    prompt   how many of `ids` are the prompt
    limit    how many tokens it may come to have
    share    how many tokens of its beginning pages that others computed may stand in for
    whole    its prompt is not cut: its tokens see those that come after them, and there is no window
    root     the chain before its first page: those of another one's are not found
    owner    whatever the engine knows it by
    """

    ids: list[int]
    prompt: int
    limit: int
    share: int = 1 << 62
    whole: bool = False
    root: int = ROOT
    owner: Any = None
    arrival: int = 0
    computed: int = 0
    reused: int = 0  # of the tokens computed, those that were found
    slot: int = -1  # -1: not running
    parked: bool = False  # its reader is behind
    pages: list[int] = field(default_factory=list)
    dropped: int = 0  # of `pages`, those at the beginning that it has given back: NO_PAGE
    draft: list[int] = field(default_factory=list)  # for the next step, where only the newest token is not computed
    published: int = 0  # pages of its prompt that can be found
    chain: int = ROOT  # the chain that the last of them ends, `root` before the first

    def __post_init__(self) -> None:
        self.chain = self.root

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self.slot >= 0

    @property
    def at_end(self) -> bool:
        """Whether all tokens but the newest are computed: the next one computed brings a new one."""
        return self.slot >= 0 and self.computed == len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens ids[first:last] of a sequence."""

    sequence: Sequence
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: a token for each of `decodes`, at its position `computed`, its draft behind it, and chunks of prompts.

    `moved` are the sequences whose slot or pages have changed since the last plan.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    moved: list[Sequence]


class Scheduler:
    """Sequences in `slots` slots and a pool of `pages`.

    budget  tokens of a step without a sequence that generates, and of a step with some: what they may wait for, where a
            prompt is long. Where many wait for their first token, it is the former: they wait too
    window  positions that a token sees in any layer, its own among them; 0: some layer sees all. Sequences have one
            page table for all layers, so only where all have a window can pages be given back
    """

    def __init__(self, slots: int, pages: int, budget: tuple[int, int], window: int = 0) -> None:
        self.pool = PagePool(pages)
        self.running: list[Sequence] = []  # oldest first, like `waiting`
        self.waiting: list[Sequence] = []
        self._budget, self._window = budget, window
        self._most = min(pages, most_pages(budget[0], window) if window else pages)
        self._slots = list(range(slots))
        self._moved: dict[Sequence, None] = {}
        self._arrivals = 0
        self._refused: tuple[int, int, int] | None = None  # what it was like when the oldest one did not fit
        self.preemptions = 0

    @property
    def beside(self) -> int:
        """Most tokens of prompts in a step of sequences that generate, but for a crowd's."""
        return self._budget[1]

    def add(self, sequence: Sequence) -> None:
        """Enter a new sequence. Raises RequestError if it could not even run alone."""
        check_size(sequence.limit, self.pool.count, self._window)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is finished or given up; its slot and pages are free."""
        if sequence.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def park(self, sequence: Sequence) -> None:
        """Compute nothing more for a sequence until `resume`."""
        sequence.parked = True
        self._refused = None
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a parked sequence, from the beginning if it was preempted."""
        if sequence.parked:
            sequence.parked = False
            if not sequence.running:
                insort(self.waiting, sequence, key=_arrival)

    @property
    def has_work(self) -> bool:
        """Whether a plan would hold anything."""
        return bool(self.waiting) or any(not sequence.parked for sequence in self.running)

    def plan(self) -> Plan:
        """The next step. What it computes must be reported by `advance` before the next plan is made."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for s in self.running if self._window else ():
            self._drop(s)
        for s in list(self.running):
            if s.parked or s.slot < 0:  # an older one took its pages just now
                continue
            if s.computed < s.prompt:
                prompts.append(s)
            elif self._grow(s, min(s.computed + 1 + AHEAD, s.limit - 1)):
                decodes.append(s)
        crowd = len(prompts) + min(len(self.waiting), len(self._slots)) >= CROWD
        whole = self._budget[bool(decodes) and not crowd]
        budget = max(whole - len(decodes), whole // LEFT, 1)
        if decodes and not crowd and (first := next(iter(prompts or self.waiting[: len(self._slots)]), None)):
            budget = min(budget, max(PART, 2 * len(decodes), -(-first.prompt // PARTS)))
        for s in decodes:
            if s.draft:
                self._fit_draft(s, budget // 2)  # what is left is for prompts
                budget -= len(s.draft)
        chunks: list[Chunk] = []
        begun: set[tuple[int, tuple[int, ...]]] = set()  # full pages that this step begins, as the pool knows them
        for s in self._prompts(prompts):
            if (chunk := self._chunk(s, budget, begun)) is not None:
                chunks.append(chunk)
                budget -= chunk.last - chunk.first
            if budget <= 0:
                break
        moved, self._moved = [s for s in self._moved if s.slot >= 0], {}
        # a prompt that came before may have taken the pages of one that generates, which may even be back already
        return Plan([s for s in decodes if s.slot >= 0 and s.computed >= s.prompt], chunks, moved)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """The tokens of a running sequence before `computed` are computed; its full prompt pages can be found now."""
        sequence.computed = computed
        while (end := (sequence.published + 1) * PAGE) <= min(computed, sequence.prompt):
            page, tokens = sequence.pages[sequence.published], sequence.ids[end - PAGE : end]
            sequence.chain = self.pool.publish(page, sequence.chain, tokens)
            sequence.published += 1

    def _fit_draft(self, s: Sequence, most: int) -> None:
        """Cut a draft to `most` tokens, to what may be generated, and to pages that nobody has to give up."""
        del s.draft[max(min(most, s.limit - len(s.ids) - 1), 0) :]
        while (free := len(s.pages) * PAGE - s.computed - 1) < len(s.draft):
            if (page := self.pool.take()) is None:
                del s.draft[free:]
                return
            s.pages.append(page)
            self._moved[s] = None

    def _prompts(self, begun: list[Sequence]) -> Iterator[Sequence]:
        """Sequences whose prompts come next: those begun, then those that get a slot."""
        yield from (s for s in begun if s.slot >= 0)
        while self.waiting and self._admit(self.waiting[0]):
            yield self._admitted

    def _chunk(self, s: Sequence, budget: int, begun: set[tuple[int, tuple[int, ...]]]) -> Chunk | None:
        """At most `budget` tokens of a prompt; None where its next page is underway elsewhere or there is no page."""
        self._adopt(s)
        last = s.prompt if s.whole else min(s.computed + budget, s.prompt, (s.dropped + self._most) * PAGE)
        start = s.published * PAGE
        key = s.chain, tuple(s.ids[start : start + PAGE])
        if s.computed == start and self._may_adopt(s) and key in begun:
            return None
        if not self._grow(s, last):
            return None
        if start + PAGE <= s.prompt:
            begun.add(key)
        return Chunk(s, s.computed, last)

    def _adopt(self, s: Sequence) -> None:
        """Take pages that others computed for the next tokens of a prompt, all but the last token's."""
        while s.computed == s.published * PAGE and self._may_adopt(s):
            end = s.computed + PAGE
            found = self.pool.find(s.chain, s.ids[s.computed : end])
            if found is None:
                break
            page, s.chain = found
            for unused in s.pages[s.published :]:  # taken for a chunk that did not come about
                self.pool.release([unused])
            del s.pages[s.published :]
            s.pages.append(page)
            s.published += 1
            s.reused += PAGE
            s.computed = end
            self._moved[s] = None
        self._drop(s)

    def _drop(self, s: Sequence) -> None:
        """Give back the pages before the window of the next token: drafts, and a step that is ahead, come after it."""
        first = (s.computed + 1 - self._window) // PAGE if self._window else 0
        if first > s.dropped:
            self.pool.release(s.pages[s.dropped : first])
            s.pages[s.dropped : first] = [NO_PAGE] * (first - s.dropped)
            s.dropped = first
            self._moved[s] = None

    @staticmethod
    def _may_adopt(s: Sequence) -> bool:
        """Whether the page after those published may be another's: the last prompt token is always computed."""
        end = (s.published + 1) * PAGE
        return end < s.prompt and end <= s.share

    def _admit(self, s: Sequence) -> bool:
        """Give the sequence that waits longest a slot, if there are one and pages for all that it wants by now, or for
        as much of it as it may have at a time."""
        state = s.arrival, self.pool.available, len(self.running)
        if state == self._refused:
            return False
        self._adopt(s)
        need = min(page_count(min(len(s.ids) + AHEAD, s.limit - 1)), s.dropped + self._most) - len(s.pages)
        while not self._slots or need > self.pool.available:
            parked = next((other for other in reversed(self.running) if other.parked), None)
            if parked is None:
                self._give_back(s)
                self._refused = state
                return False
            self._preempt(parked)
        self.waiting.pop(0)
        s.slot = heappop(self._slots)
        insort(self.running, s, key=_arrival)
        self._moved[s] = None
        self._admitted = s
        return True

    def _grow(self, s: Sequence, positions: int) -> bool:
        """See that a running sequence has pages for that many positions; False: it has to sit this step out."""
        while len(s.pages) * PAGE < positions:
            page = self.pool.take()
            if page is not None:
                s.pages.append(page)
                self._moved[s] = None
            elif (victim := self._victim(s)) is not None:
                self._preempt(victim)
            else:
                return False
        return True

    def _victim(self, s: Sequence) -> Sequence | None:
        """Who gives up pages for `s`: the newest whose reader is behind, else the newest that came after it."""
        parked = next((other for other in reversed(self.running) if other.parked), None)
        newest = self.running[-1]
        return parked or (newest if newest is not s else None)

    def _preempt(self, s: Sequence) -> None:
        self.preemptions += 1
        self._stop(s)
        if not s.parked:
            insort(self.waiting, s, key=_arrival)

    def _stop(self, s: Sequence) -> None:
        self.running.remove(s)
        heappush(self._slots, s.slot)
        s.slot, s.draft = -1, []
        self._give_back(s)

    def _give_back(self, s: Sequence) -> None:
        self.pool.release(s.pages[s.dropped :])
        s.pages, s.chain = [], s.root
        s.computed = s.published = s.reused = s.dropped = 0


def most_pages(tokens: int, window: int) -> int:
    """Pages that `tokens` new ones take, wherever they begin, with the window that they see and what is AHEAD."""
    return page_count(tokens - 1 + window - 1 + AHEAD) + 1


def least_pages(positions: int, window: int) -> int:
    """Pages without which a sequence cannot come to that many positions."""
    return min(page_count(positions), most_pages(1, window)) if window else page_count(positions)


def check_size(limit: int, pages: int, window: int = 0) -> None:
    """Raise RequestError where a sequence of up to `limit` tokens does not fit in that many pages."""
    if least_pages(limit - 1, window) > pages:
        raise RequestError(
            f"prompt and output may come to {limit} tokens; the memory for keys and values holds {pages * PAGE}: "
            "ask for fewer tokens, or give it more (kv_memory, --kv-memory)"
        )


def _arrival(s: Sequence) -> int:
    return s.arrival
