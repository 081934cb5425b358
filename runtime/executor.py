"""Computes the steps that the scheduler plans, and chooses their tokens: on the device where it can, else on the host.

On CUDA the sequences that sample on the device run as one flight, which stays a step ahead of the host until others
join it, or so many have left that a smaller step does; log-probabilities are looked up there, too. The host samples for
those that may not end yet, and waits for a step of those that follow a grammar, or compute tokens again after
preemption, which draw nothing. While a draft is verified all are in one step, which the host waits for, and nothing is
ahead.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch
from torch import Tensor

from nibblelm import choosing, ops
from nibblelm.choosing import Choice
from nibblelm.decode_steps import SampledSteps, to_host
from nibblelm.memory import out_of_memory
from nibblelm.pages import PAGE
from nibblelm.prompt_steps import PREFILL_CHUNK, Prompt
from nibblelm.request import LogitsRequest, Request
from nibblelm.runner import Runner
from nibblelm.sampler import Sampled, Sampler, device_sampling
from nibblelm.sampling_params import SamplingParams
from nibblelm.scheduler import Chunk, Plan, Scheduler, Sequence
from nibblelm.stats import Stats

STEP_ROWS = {"cpu": (), "cuda": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)}
"""Rows that a decode step is filled up to with rows that nobody reads: on CUDA a program is captured for each count
that occurs, which takes longer than a step and keeps memory; on the CPU a row costs more than its program."""

_Landing = Iterator[list[tuple[Sequence, Choice]]]

_NOTHING: _Landing = iter(())


class Executor:
    """Steps of one runner, whose last slot and last page the scheduler does not have: they are of rows nobody reads.

    Each sequence's `owner` is its Request or LogitsRequest.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, stats: Stats, step_rows: tuple[int, ...] | None = None
    ) -> None:
        self._runner, self._scheduler, self._stats = runner, scheduler, stats
        self._step_rows = STEP_ROWS[runner.device.type] if step_rows is None else step_rows
        self._spare = len(runner.history) - 1
        if self._step_rows:
            runner.set_pages(self._spare, [runner.cache.pages - 1] * runner.tables.shape[1])
        self._members: list[Sequence | None] = []  # of the flight; None: has left it
        self._flight: SampledSteps | None = None
        self._behind = False  # whether the host has not waited for the prompts of the step before

    def bars_drafts(self, sequence: Sequence) -> bool:
        """Whether verifying drafts costs more than they bring: what its penalties and its bias say of every token would
        go to the device with each step."""
        return self._runner.samples_on_device and sequence.owner.sampler.wide

    @property
    def ahead(self) -> bool:
        """Whether the device computes a step already whose tokens the host has not seen."""
        return self._flight is not None and self._flight.in_flight > 0

    def prepare(self) -> bool:
        """`Runner.prepare_prompts` of what a step takes beside sequences that generate, then `prepare_sampled` of all
        that may be there; none where memory is short."""
        runner = self._runner
        sizes = [count for count in self._step_rows if count <= self._padded(self._spare)]
        runner.history[self._spare].clear()
        try:
            return runner.prepare_prompts(self._scheduler.beside) or (
                runner.samples_on_device
                and (runner.prepare_sampled(sizes, self._spare) or runner.prepare_beside(sizes))
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False

    def run(self, plan: Plan, land: bool = False) -> Iterator[list[tuple[Sequence, Choice]]]:
        """Compute a step. Yields the sequences that are due a token with what was chosen for each, as soon as they are.

        A sequence with a draft is due several. `land`: nothing is ahead after this step, which has no drafts.
        """
        self._set_moved(plan)
        landing, late, flying = _NOTHING, _NOTHING, list[Sequence]()
        launches, beside = list(_launches(plan.chunks, PREFILL_CHUNK[self._runner.device.type])), None
        if self._runner.samples_on_device and not any(s.draft for s in plan.decodes):
            hosted: list[Sequence] = []
            for s in plan.decodes:
                (flying if s.at_end and s.owner.sampler.runs_ahead else hosted).append(s)
            landing, late, beside = self._fly(flying, land, launches)
        else:
            assert not self.ahead
            self._flight, hosted = None, plan.decodes
        if hosted:
            yield from self._decode(hosted)
        ended: list[tuple[Sequence, Tensor]] = []
        for chunks in launches:
            logits, beside = self._prefill(chunks, beside), None
            done = [
                (s, logits[i : i + 1]) for i, s in enumerate(c.sequence for c in chunks) if s.computed == len(s.ids)
            ]
            computed: list[tuple[Sequence, Choice]] = [(s, None) for s, _ in done if isinstance(s.owner, LogitsRequest)]
            if computed:
                yield computed
            ended += [(s, row) for s, row in done if not isinstance(s.owner, LogitsRequest)]
        self._behind = bool(plan.chunks) and not ended
        goes_on = flying if not land else []  # with whoever joins them
        for chosen in landing:
            self._go_on(goes_on if not ended else [])
            yield chosen
        if ended:
            joined = self._join(goes_on, ended)
            first, others = self._first_tokens(ended, joined), list(late)
            if joined is None:
                self._go_on(goes_on and [*goes_on, *(s for s, _ in first)])
            else:
                newest = [s.ids[-1] for s in self._members if s is not None]
                joined.run.fed = [*newest, *joined.run.fed[len(newest) :]]
            yield from others
            yield first

    def _set_moved(self, plan: Plan) -> None:
        """Tell the runner of slots and pages that have changed, but for those of prompts: they go with the tokens."""
        prompts = {c.sequence for c in plan.chunks if not c.sequence.owner.every_row}
        if moved := {s.slot: s.pages for s in plan.moved if s not in prompts}:
            self._runner.set_tables(moved)
        for s in plan.moved:
            self._runner.set_prompt(s.slot, s.ids, s.prompt)

    def _go_on(self, members: list[Sequence]) -> None:
        """Launch the next step of those that have a token to feed it before any is handed out, if nothing is ahead: the
        device would wait meanwhile. Those that turn out to have ended leave it. One may have to get a page before."""
        going = [s for s in members if s.at_end and not s.parked and len(s.ids) < s.limit]
        going = [s for s in going if s.owner.sampler.runs_ahead]
        if going and not self.ahead and all(s.computed < len(s.pages) * PAGE for s in going):
            self._launched(going).launch(last=True)

    def _prefill(self, chunks: list[Chunk], beside: Tensor | None) -> Tensor:
        """Compute what is launched together. Returns the logits (1, vocab) after each chunk; those `beside` the flight
        are launched."""
        request: Request | LogitsRequest = chunks[0].sequence.owner
        for chunk in chunks:
            chunk.sequence.owner.begin()
        if request.every_row:
            (chunk,) = chunks
            s = chunk.sequence
            logits = self._runner.prefill(s.ids[: chunk.last], s.slot, chunk.first, every_row=True)
            request.take_rows(chunk.first, logits)
            logits = logits[-1:]
        else:
            logits = self._runner.prefill_together(_prompts(chunks)) if beside is None else beside
        for chunk in chunks:
            self._scheduler.advance(chunk.sequence, chunk.last)
        return logits

    def _join(self, members: list[Sequence], ended: list[tuple[Sequence, Tensor]]) -> "_Joined | None":
        """Launch the next step of those that generate and of those whose prompts end, behind what draws the tokens that
        it feeds: the device has no pause while the host waits for them and looks at them. Those that turn out to have
        ended leave it. None where a draw depends on the token before it, or somebody may have to get a page first."""
        flight, rows = self._flight, {s: i for i, s in enumerate(self._members) if s is not None}
        ahead = 0 if flight is None else flight.in_flight
        going = [s for s in members if s.at_end and not s.parked and len(s.ids) + ahead < s.limit]
        first = [s for s, _ in ended if len(s.ids) + 1 < s.limit]
        at = [s.computed + ahead for s in going] + [s.computed for s in first]
        if not going or flight is None or ahead > 1 or any(s not in rows or s.owner.sampler.wide for s in going):
            return None
        if any(position >= len(s.pages) * PAGE for s, position in zip(going + first, at, strict=True)):
            return None
        samplers = [s.owner.sampler for s, _ in ended]
        if not choosing.draws_ahead(samplers, ended[0][1]):
            return None
        tokens = choosing.drawn_ahead(samplers, torch.cat([row for _, row in ended]))
        found, there = to_host(tokens), torch.cuda.Event()
        there.record(torch.cuda.current_stream(tokens.device))
        fed, own = flight.hand_over(), {s: i for i, (s, _) in enumerate(ended)}
        sources = [rows[s] for s in going] + [len(fed) + own[s] for s in first]
        more = self._padded(len(sources)) - len(sources)
        index = ops.to_device(torch.tensor(sources + sources[:1] * more), tokens.device)
        ids, slots = [0] * (len(at) + more), [s.slot for s in going + first] + [self._spare] * more
        drawn, drafts = torch.cat([fed, tokens])[index], [[0] * ahead] * len(going) + [[0]] * len(first)
        run = self._flown(going + first, ids, slots, at + [0] * more, drafts + [[]] * more, drawn)
        run.launch(last=True)
        return _Joined(run, found, there)

    def _first_tokens(
        self, ended: list[tuple[Sequence, Tensor]], joined: "_Joined | None"
    ) -> list[tuple[Sequence, Choice]]:
        """The tokens after prompts, from the logits (1, vocab) of each: all together, once the device has its work."""
        if joined is None:
            chosen = choosing.choose([s for s, _ in ended], torch.cat([row for _, row in ended]))
        else:
            joined.there.synchronize()
            tokens = zip(ended, joined.tokens.tolist(), strict=True)
            chosen = [(s, choosing.accepted(s.owner.sampler, Sampled(token))) for (s, _), token in tokens]
        for s, choice in chosen:
            _append(s, choice)
            s.owner.prompt_done(s.reused)
        return chosen

    def _decode(self, members: list[Sequence]) -> Iterator[list[tuple[Sequence, Choice]]]:
        """A row of each sequence and of each token of its draft. The first row's token is chosen; where it is what was
        drafted, the next row's is, and so on: each after what came before it."""
        logits = self._runner.decode(*self._rows(members))
        firsts = accumulate((1 + len(s.draft) for s in members), initial=0)
        due = {s: first for s, first in zip(members, firsts, strict=False) if s.at_end}
        for s in members:
            if s not in due:
                self._scheduler.advance(s, s.computed + 1)
            s.owner.drafted_tokens += len(s.draft)
            self._stats.drafts += bool(s.draft)
            self._stats.draft_tokens += len(s.draft)
        together = [s for s in due if choosing.draws(logits) and s.owner.sampler.runs_ahead]
        if together:
            rows = [due[s] + i for s in together for i in range(1 + len(s.draft))]
            yield from self._verify(together, choosing.picked(logits, rows))
        while due := {s: row for s, row in due.items() if s not in together}:
            chosen = choosing.choose(list(due), choosing.picked(logits, list(due.values())))
            right = [s for s, choice in chosen if self._accept(s, choice)]
            yield chosen
            due = {s: due[s] + 1 for s in right if s.running}

    def _verify(self, members: list[Sequence], logits: Tensor) -> Iterator[list[tuple[Sequence, Choice]]]:
        """The same from all rows of sequences whose tokens need not be seen before the next is drawn, drawn at once."""
        samplers = [s.owner.sampler for s in members for _ in range(1 + len(s.draft))]
        drafts = [s.draft[:i] for s in members for i in range(1 + len(s.draft))]
        drawn = iter(choosing.draw(samplers, logits, logits, drafts))
        for s in members:
            for chosen in list(islice(drawn, 1 + len(s.draft))):
                choice = choosing.accepted(s.owner.sampler, chosen)
                right = self._accept(s, choice)
                yield [(s, choice)]
                if not (right and s.running):
                    break

    def _accept(self, s: Sequence, choice: Choice) -> bool:
        """The token after the newest one is chosen. Whether it was drafted so, and the next row counts."""
        self._scheduler.advance(s, s.computed + 1)
        _append(s, choice)
        right = isinstance(choice, Sampled) and s.draft[:1] == [choice.token_id]
        s.draft = s.draft[1:] if right else []
        s.owner.accepted_tokens += right
        self._stats.accepted_tokens += right
        return right

    def _fly(
        self, wanted: list[Sequence], land: bool, launches: list[list[Chunk]]
    ) -> tuple[_Landing, _Landing, Tensor | None]:
        """Launch a step of the flight; its tokens are for when the device has prompts to go on with. For other members
        than it has it is launched anew, once the step that it is ahead is used up.

        land      nothing is ahead afterwards
        launches  prompts of this step. The first of them are computed in the flight's step where that can be

        Returns tokens, those for after the tokens that follow prompts, and the logits of prompts that were launched.
        """
        flight, steps, beside = self._flight, 1, None
        ending = [any(c.last == c.sequence.prompt for c in chunks) for chunks in launches]
        goes_on = flight is not None and self._goes_on(flight, wanted)
        if flight is not None and not goes_on and flight.in_flight:
            self._flight = None
        elif wanted:
            if flight is None or not goes_on:
                flight = self._launched(wanted)
            if launches and not land and _can_be_beside(launches[0], wanted, flight):
                beside = self._runner.prefill_beside(_prompts(launches[0]), flight)
            if beside is not None:
                # Where no prompt ends, the step is the one ahead: the next prompts' may follow it at once.
                steps = flight.in_flight - (not any(ending))
            else:
                # The host waits for prompts that end. Where the device has others of the step before still to do, the
                # flight has a step between the two, or its readers would wait for both.
                between = any(ending) and self._behind and not land
                ends = land or (any(ending) and not between)
                # One that ends computes a row for nobody; a step of such rows alone is not launched.
                flight.launch(last=ends or all(len(s.ids) + 1 >= s.limit for s in wanted))
                steps = 2 if between and flight.in_flight > 1 else 1
        else:
            self._flight = None
            return _NOTHING, _NOTHING, None
        # Others ended, or lost their pages, while the step was under way. Decided before prompts are computed: it would
        # be wrong of one that is among them again.
        due = [s if s is not None and s.at_end else None for s in self._members]
        late = 1 if beside is not None and any(ending) else 0
        landed = (chain.from_iterable(self._landed(flight, due) for _ in range(n)) for n in (steps - late, late))
        return next(landed), next(landed), beside

    def _landed(self, flight: SampledSteps, due: list[Sequence | None]) -> Iterator[list[tuple[Sequence, Choice]]]:
        tokens = flight.next(last=True)
        self._runner.history[self._spare].clear()  # what those rows are fed takes no room
        chosen: list[tuple[Sequence, Choice]] = []
        for i, (s, token) in enumerate(zip(due, tokens, strict=False)):
            if s is not None and s.running:  # the step's first token may have been its last
                self._scheduler.advance(s, s.computed + 1)
                choice = choosing.accepted(s.owner.sampler, flight.logprobs.get(i) or Sampled(token))
                _append(s, choice)
                chosen.append((s, choice))
        yield chosen

    def _goes_on(self, flight: SampledSteps, wanted: list[Sequence]) -> bool:
        """Whether the flight has all that are wanted, in a step of no more rows than they take; others leave it."""
        there = set(wanted)
        gone = [i for i, s in enumerate(self._members) if s is not None and s not in there]
        left = len(self._members) - self._members.count(None) - len(gone)
        if not wanted or left < len(wanted) or self._padded(left) < self._padded(len(self._members)):
            return False
        if gone:
            flight.drop(gone, self._spare)
            for i in gone:
                self._members[i] = None
        return True

    def _launched(self, members: list[Sequence]) -> SampledSteps:
        return self._flown(members, *self._rows(members))

    def _flown(
        self,
        members: list[Sequence],
        ids: list[int],
        slots: list[int],
        positions: list[int],
        drafts: list[list[int]] | None = None,
        drawn: Tensor | None = None,
    ) -> SampledSteps:
        """A flight of rows as `_rows` has them, behind the tokens of `drafts`; it is fed `drawn` in place of ids."""
        vocab_size = self._runner.model.config.vocab_size
        greedy = Sampler(SamplingParams(temperature=0), vocab_size)
        samplers = [s.owner.sampler for s in members] + [greedy] * (len(ids) - len(members))
        state, wanted = device_sampling(samplers, vocab_size, drafts), choosing.wanted_scores(samplers)
        self._members = list(members)
        self._flight = self._runner.sampled_steps(ids, slots, state, wanted, positions, drawn)
        return self._flight

    def _rows(self, members: list[Sequence]) -> tuple[list[int], list[int], list[int]]:
        """Ids, slots and positions of a step, filled up. What drafts and a flight wrote for nobody is forgotten."""
        for s in members:
            del self._runner.history[s.slot][s.computed :]
        self._runner.history[self._spare].clear()
        ids = [token for s in members for token in (s.ids[s.computed], *s.draft)]
        slots = [s.slot for s in members for _ in range(1 + len(s.draft))]
        positions = [s.computed + i for s in members for i in range(1 + len(s.draft))]
        more = self._padded(len(ids)) - len(ids)
        return ids + [0] * more, slots + [self._spare] * more, positions + [0] * more

    def _padded(self, rows: int) -> int:
        """Rows of the step that takes so many."""
        return next((count for count in self._step_rows if count >= rows), rows)


@dataclass
class _Joined:
    """A flight that others join, launched before the host has the tokens that they feed it."""

    run: SampledSteps
    tokens: Tensor  # (J,) of all whose prompts ended, on the host once that is `there`
    there: torch.cuda.Event


def _append(s: Sequence, choice: Choice) -> None:
    if isinstance(choice, Sampled):
        s.ids.append(choice.token_id)


def _prompts(chunks: list[Chunk]) -> list[Prompt]:
    return [Prompt(c.sequence.ids[: c.last], c.sequence.slot, c.first, c.sequence.pages) for c in chunks]


def _can_be_beside(chunks: list[Chunk], wanted: list[Sequence], flight: SampledSteps) -> bool:
    """Whether prompts may be computed in the flight's next step, which some of its members still want."""
    alone = chunks[0].sequence.owner.every_row or chunks[0].sequence.whole
    return not alone and flight.has_room and any(len(s.ids) + flight.in_flight < s.limit for s in wanted)


def _launches(chunks: Iterable[Chunk], room: int) -> Iterator[list[Chunk]]:
    """A step's chunks as they are launched: `room` tokens together; alone where every row's logits are read, or a
    prompt may not be cut."""
    together: list[Chunk] = []
    free = room
    for chunk in chunks:
        if chunk.sequence.owner.every_row or chunk.sequence.whole:
            yield [chunk]
            continue
        first = chunk.first
        while first < chunk.last:
            last = min(first + free, chunk.last)
            together.append(Chunk(chunk.sequence, first, last))
            free -= last - first
            first = last
            if not free:
                yield together
                together, free = [], room
    if together:
        yield together
