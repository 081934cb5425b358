"""A card that is pretended, so that what a server's host side costs shows without one: its steps take as long as those
of an 8B model in int4 on one H200 (benchmarks/h200), in which the engine's thread sleeps, and its tokens are random.

    python scripts/pretended_card.py PORT < bodies      reads streams as cheaply as Python can, and says what came

is the client: every request of a JSON list is sent to /v1/completions at once.
"""

import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

PROMPT_TOKENS_S = 41_000
FIRST_ID = 300
"""Of the tokens that are drawn: those before are bytes and marks, which make no text of their own."""


def decode_s(rows: int) -> float:
    """Seconds of a step that generates: 690 tokens a second alone, 24,200 for 256."""
    return 1.41e-3 + 0.036e-3 * rows


class Card:
    """What the engine asks of a Runner, for `slots` sequences and a vocabulary of that size."""

    device: Any = SimpleNamespace(type="cuda")  # so that steps sample on the device; first logits are on the CPU
    samples_on_device, bidirectional = True, False

    def __init__(self, slots: int, vocab_size: int) -> None:
        import torch

        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
        self.history: list[list[int]] = [[] for _ in range(slots + 1)]
        self.cache, self.tables = SimpleNamespace(pages=1), torch.zeros(slots + 1, 1)
        self.busy_s = self._free_at = 0.0
        self._logits = torch.zeros(slots, vocab_size)
        self._logits[:, FIRST_ID] = 1
        draw = random.Random(0)
        self.tokens = [draw.randrange(FIRST_ID, vocab_size) for _ in range(4 * slots)]

    def works(self, seconds: float) -> float:
        """Put a step behind what is under way. When it ends."""
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        self.busy_s += seconds
        return self._free_at

    def set_tables(self, *_: Any) -> None: ...

    set_pages = set_prompt = set_tables

    def root(self, _: Sequence[int]) -> int:
        return 0

    def prefill_together(self, prompts: Sequence[Any]) -> Any:
        for p in prompts:
            self.history[p.slot] = list(p.ids)
        alone = self._free_at <= time.perf_counter()
        ends = self.works(sum(len(p.ids) - p.start for p in prompts) / PROMPT_TOKENS_S)
        if alone:  # a first token is waited for; what is under way besides, `Steps` waits for
            time.sleep(max(0.0, ends - time.perf_counter()))
        return self._logits[: len(prompts)]

    def prefill_beside(self, prompts: Sequence[Any], run: "Steps") -> Any:
        for p in prompts:
            self.history[p.slot] = list(p.ids)
        run.launch_beside(sum(len(p.ids) - p.start for p in prompts))
        return self._logits[: len(prompts)]

    def sampled_steps(self, _: Sequence[int], slots: Sequence[int], *__: Any) -> "Steps":
        return Steps(self, list(slots))


class Steps:
    """SampledSteps, with one step ahead."""

    logprobs: ClassVar[dict[int, Any]] = {}

    def __init__(self, card: Card, slots: list[int]) -> None:
        self._card, self._slots, self._ends = card, slots, list[float]()

    @property
    def in_flight(self) -> int:
        return len(self._ends)

    @property
    def has_room(self) -> bool:
        return len(self._ends) < 2

    def launch_beside(self, tokens: int) -> None:
        rows = len(self._slots)
        self._ends.append(self._card.works(max(decode_s(rows), (tokens + rows) / PROMPT_TOKENS_S)))

    def launch(self, last: bool = False) -> None:
        while len(self._ends) < (1 if last else 2):
            self._ends.append(self._card.works(decode_s(len(self._slots))))

    def next(self, last: bool = False) -> list[int]:
        self.launch(last)
        time.sleep(max(0.0, self._ends.pop(0) - time.perf_counter()))
        first = random.randrange(len(self._card.tokens) - len(self._slots))
        tokens = self._card.tokens[first : first + len(self._slots)]
        for slot, token in zip(self._slots, tokens, strict=True):
            self._card.history[slot].append(token)
        return tokens

    def drop(self, gone: Sequence[int], spare: int) -> None:
        for i in gone:
            self._slots[i] = spare


def main() -> None:
    """The client."""
    ready, events, begun = selectors.DefaultSelector(), 0, time.perf_counter()
    for body in json.load(sys.stdin):
        data = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        head = "POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        ready.register(client, selectors.EVENT_READ, [])
    done = 0
    while ready.get_map():
        for key, _ in ready.select():
            client, parts = key.fileobj, key.data
            assert isinstance(client, socket.socket)
            if data := client.recv(1 << 16):
                events += data.count(b"data: {")
                parts[:] = [*parts[-1:], data]
            else:
                done += b"data: [DONE]" in b"".join(parts)
                ready.unregister(client)
                client.close()
    print(json.dumps({"seconds": time.perf_counter() - begun, "events": events, "done": done}))


if __name__ == "__main__":
    main()
