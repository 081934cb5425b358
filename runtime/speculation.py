"""Drafts: what may come next, to be verified in one step. Plain Python: no model and no device.

A step of k + 1 rows takes little longer than one of a single row while reading the weights is what takes the time. Each
row's token is drawn as it would be without a draft, and the next row counts only if its token was drafted so: a draft
changes when tokens come, and never which.

How much is drafted follows from what a step of so many rows takes, and from the share of drafted tokens that would have
been right in each sequence: drafts that are not computed are compared with what comes, too, so that nothing is lost
where none is right.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nibblelm.errors import RequestError
from nibblelm.scheduler import Sequence

_VNNI = {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.2, 5: 1.25, 6: 1.35, 7: 1.5, 8: 1.6, 10: 1.8, 12: 2.1}

STEP_COST: dict[str, dict[int, float]] = {
    "avx512": _VNNI,
    "avxvnni": _VNNI,
    "avx2": {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.4, 5: 1.6, 6: 1.8, 8: 2.5, 10: 3.0},
    "portable": {1: 1.0},
    "cuda": {1: 1.0, 2: 1.15, 4: 1.2, 8: 1.4, 16: 1.8, 24: 1.9, 32: 2.0, 48: 2.4, 64: 2.8, 96: 3.7, 128: 4.5},
}
"""What a step takes by its rows and by `ops.devices.kernels`, beside one of one row; of more rows than these nothing is
drafted. CPU: 1.1B int4 per row on two cores; CUDA: 8B int4 per row on an H200, with programs of these row counts."""

WORTH = 1.2
"""Tokens a unit of time that drafts must promise, beside none: the host has work with them, and no step is ahead."""

LEAST = 0.2
"""Share of right tokens below which a sequence's drafts are left out: others' gain would pay for their rows."""

FADE = 0.95
"""What a drafted token, right or wrong, counts for beside the next one of its sequence."""


def speculation(name: str | None, kernels: str) -> "Speculation | None":
    """What `speculate` asks for on a kind of `ops.devices.kernels`. Raises RequestError for an unknown name."""
    if name not in (None, "ngram"):
        raise RequestError(f'speculate is {name!r}; supported: "ngram", None for one token a step')
    return None if name is None else Speculation(lambda _: PromptLookup(), STEP_COST[kernels])


class Drafter(Protocol):
    """Guesses for one sequence."""

    def draft(self, ids: list[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `ids`: the prompt and the output so far, of which more is there at each
        call. [] where there is nothing to go by."""
        ...


class PromptLookup:
    """What followed the last tokens where they stood before, in prompt or output (n-gram drafts, "prompt lookup").

    Of the `places` newest places with the same last two tokens that with the longest common end, at most `longest`
    tokens, and of these the newest. Where what followed ends, it goes on with itself, as in a text that repeats.
    """

    def __init__(self, places: int = 16, longest: int = 8) -> None:
        self._places, self._longest = places, longest
        self._newest: dict[tuple[int, int], int] = {}  # where a pair of tokens ended last
        self._before: list[int] = []  # for each token where the pair that it ends had ended before, -1: nowhere

    def draft(self, ids: list[int], most: int) -> list[int]:
        for end in range(len(self._before), len(ids)):
            pair = ids[end - 1] if end else -1, ids[end]
            self._before.append(self._newest.get(pair, -1))
            self._newest[pair] = end
        best, common, place = -1, 0, self._before[-1]
        for _ in range(self._places):
            if place < 0 or common == self._longest:
                break
            length = 2
            while length < min(self._longest, place + 1) and ids[place - length] == ids[-1 - length]:
                length += 1
            if length > common:
                best, common = place, length
            place = self._before[place]
        if best < 0:
            return []
        period = len(ids) - 1 - best
        found = ids[best + 1 : best + 1 + most]
        while len(found) < most:
            found.append(found[-period])
        return found


@dataclass(eq=False, slots=True)
class _History:
    """How the drafts of one sequence fare.

    seen, right   drafted tokens that were compared with what came, and those that were right, faded
    first, last   where the newest draft stands, and its tokens
    """

    drafter: Drafter
    seen: float = 0.0
    right: float = 0.0
    first: int = 0
    last: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """The chance that a drafted token is right when those before it are: one half before anything is known."""
        return (self.right + 1) / (self.seen + 2)

    def draft(self, ids: list[int], most: int) -> list[int]:
        """Compare the newest draft with what has come in its place, up to the first that is wrong; then the next."""
        for token, came in zip(self.last, ids[self.first :], strict=False):
            self.seen, self.right = FADE * self.seen + 1, FADE * self.right + (token == came)
            if token != came:
                break
        self.first, self.last = len(ids), self.drafter.draft(ids, most)[:most]
        return self.last


class Speculation:
    """Drafts for the sequences of one engine.

    drafter  makes the Drafter of a sequence from its prompt's ids
    costs    as in STEP_COST
    on       False: no drafts from the next step on
    """

    def __init__(self, drafter: Callable[[list[int]], Drafter], costs: Mapping[int, float]) -> None:
        self._drafter, self._costs = drafter, sorted(costs.items())
        self.on = True
        self._histories: dict[Sequence, _History] = {}

    @property
    def most_rows(self) -> int:
        """Of a step with drafts."""
        return self._costs[-1][0]

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._histories.pop(sequence, None)

    def propose(
        self,
        running: Iterable[Sequence],
        ahead: bool = False,
        barred: Callable[[Sequence], bool] = lambda _: False,
    ) -> tuple[bool, list[tuple[Sequence, Exception]]]:
        """Give sequences the draft for their next step, as far as that pays.

        ahead    the device computes the next step already: nobody gets a draft, since these come from all tokens
        barred   says of a sequence that it gets none
        returns  whether it pays, and whose drafter failed
        """
        generating = [s for s in running if not s.parked and s.computed >= s.prompt]
        for s in generating:
            s.draft = []  # of a step that it had to sit out
        room = self._costs[-1][0] - len(generating) if self.on else 0
        drafts: dict[Sequence, list[int]] = {}
        failed: list[tuple[Sequence, Exception]] = []
        for s in generating if room > 0 else ():
            try:
                draft = self._draft(s, room) if s.at_end and not barred(s) else []
                if draft and self._histories[s].acceptance >= LEAST:
                    drafts[s] = draft
            except Exception as error:  # that of a drafter is its own sequence's alone
                failed.append((s, error))
        most = self._length(drafts, len(generating))
        for s, draft in drafts.items() if not ahead else ():
            s.draft = draft[:most]
        return most > 0, failed

    def _draft(self, s: Sequence, room: int) -> list[int]:
        history = self._histories.get(s)
        if history is None:
            history = self._histories[s] = _History(self._drafter(s.ids[: s.prompt]))
        return history.draft(s.ids, min(room, s.limit - len(s.ids) - 1))

    def _length(self, drafts: Mapping[Sequence, list[int]], sequences: int) -> int:
        """At most how many tokens of each draft are worth their rows; 0: none."""
        best, most = WORTH * sequences / self._cost(sequences), 0
        for length in sorted({rows - 1 for rows, _ in self._costs[1:]}) if drafts else ():
            tokens, rows = float(sequences), sequences
            for s, draft in drafts.items():
                count, p = min(length, len(draft)), self._histories[s].acceptance
                tokens += p * (1 - p**count) / (1 - p)
                rows += count
            if rows > self._costs[-1][0]:
                break
            if (rate := tokens / self._cost(rows)) > best:
                best, most = rate, length
        return most

    def _cost(self, rows: int) -> float:
        return next((cost for most, cost in self._costs if most >= rows), float("inf"))
