"""Host to device through pinned memory: torch's threads fill one slot of a ring from the file's pages while the slots
before it are on the bus.

A copy straight from pageable memory stages through the driver on one thread and reaches about a sixth of the bus, and
waits for everything ahead of it on the stream.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock

import torch
from torch import Tensor

SLOT, SLOTS = 8 << 20, 8
_lock = Lock()
_ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # in front the slot whose copy is the oldest


def upload(parts: Sequence[Tensor], device: torch.device, out: Tensor | None = None) -> Tensor:
    """The rows of `parts`, one part after another, contiguous on `device`; in `out`, which is contiguous, if given.

    A single contiguous tensor that is there already comes back as it is. The copy is queued on the device's
    current stream: work on that stream finds it done, and the host may drop the parts.
    """
    if device.type == "cpu" or any(p.device.type != "cpu" for p in parts):
        there = [p.to(device) for p in parts]
        whole = there[0].contiguous() if len(there) == 1 else torch.cat(there)
        return whole if out is None else out.copy_(whole)
    shape = sum(p.shape[0] for p in parts), *parts[0].shape[1:]
    target = torch.empty(shape, dtype=parts[0].dtype, device=device) if out is None else out
    if (target.shape, target.dtype) != (shape, parts[0].dtype):
        raise ValueError(f"upload: {shape} {parts[0].dtype} into {tuple(target.shape)} {target.dtype}; want the same")
    rest, stream = target.view(-1).view(torch.uint8), torch.cuda.current_stream(device)
    with _lock, torch.cuda.device(device):  # pinned memory, too, is made through the current card
        for pieces in _slotfuls(parts):
            slot, filled = _free_slot(), 0
            for piece in pieces:
                slot[filled : filled + piece.numel()].copy_(piece)
                filled += piece.numel()
            rest[:filled].copy_(slot[:filled], non_blocking=True)
            rest, sent = rest[filled:], torch.cuda.Event()
            sent.record(stream)
            _ring.append((slot, sent))
    return target


def _slotfuls(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of all parts in order, in lists that fill a slot each."""
    pieces, room = [], SLOT
    for part in parts:
        raw = part.contiguous().view(-1).view(torch.uint8)
        while raw.numel():
            pieces.append(raw[:room])
            room, raw = room - pieces[-1].numel(), raw[room:]
            if room == 0:
                yield pieces
                pieces, room = [], SLOT
    if pieces:
        yield pieces


def _free_slot() -> Tensor:
    """The slot whose copy is the oldest, when that is done."""
    if not _ring:
        with torch.inference_mode(False):  # what is made in it could not be written to outside
            memory = torch.empty(SLOTS, SLOT, dtype=torch.uint8, pin_memory=True)
        _ring.extend((slot, torch.cuda.Event()) for slot in memory)
    slot, sent = _ring.popleft()
    sent.synchronize()
    return slot
