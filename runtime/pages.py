"""The pool of KV pages: who holds which, and full pages of prompts found again by their tokens."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from nibblelm import _cpu

PAGE: int = _cpu.PAGE
"""Positions of one sequence that one page holds."""

NO_PAGE = -1
"""In place of a sequence's page: behind its last one, and where it has given one back."""

ROOT = 0
"""The chain of a prompt before its first page; numbers below it are those of prompts that are computed otherwise."""


def page_count(positions: int) -> int:
    """How many pages that many positions take."""
    return -(-positions // PAGE)


class PagePool:
    """`count` pages, numbered from 0.

    A page that is held by nobody is free, or idle if it was published: an idle page keeps its contents until it is the
    one that was used longest ago when a page is wanted and none is free.

    A published page is found by its own tokens and its chain: the number that its predecessor in the prompt got when
    that was published, ROOT for the first. Numbers are never used again, so a chain means all tokens before the page;
    the page's own are compared one by one (they are part of the key, not only of its hash).
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._fresh = 0  # no page from this one on was ever taken: a pool may be far larger than what is used of it
        self._free: list[int] = []  # the last one freed is taken first: its memory is warm
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one used longest ago comes first
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (chain, tokens): page, its own chain
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._last = ROOT

    @property
    def available(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._idle) + self.count - self._fresh

    def take(self) -> int | None:
        """A page for one holder, None if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._fresh < self.count:
            page, self._fresh = self._fresh, self._fresh + 1
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._found[self._key.pop(page)]
        else:
            return None
        self._held[page] = 1
        return page

    def find(self, chain: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The published page of these tokens after that chain, with one more holder, and the chain that it ends."""
        found = self._found.get((chain, tuple(tokens)))
        if found is not None:
            if not self._held[found[0]]:
                del self._idle[found[0]]
            self._held[found[0]] += 1
        return found

    def publish(self, page: int, chain: int, tokens: Sequence[int]) -> int:
        """Let a held page be found. Returns the chain that it ends; if the same page is there already, that one's."""
        key = (chain, tuple(tokens))
        if key not in self._found:
            self._last += 1
            self._found[key] = page, self._last
            self._key[page] = key
        return self._found[key][1]

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each of a sequence's pages, given in its order."""
        for page in reversed(list(pages)):  # the end of a chain is of no use without its beginning, so it goes first
            self._held[page] -= 1
            if self._held[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._free.append(page)
