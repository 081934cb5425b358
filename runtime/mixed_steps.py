"""Steps that compute prompts and the next tokens of a run: weights are read once for both, and nobody waits for two
steps. They have the bits of the two, since a row's do not depend on who shares its step.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.decode_steps import IDLE, DecodeStep, MixedStep, SampledSteps
from nibblelm.layers import DecoderModel
from nibblelm.memory import out_of_memory
from nibblelm.prompt_steps import MIXED_ROWS, Prompt, PromptInputs, filled_up

PREPARED = (64, 128, 192)
"""Rows of prompts for which an idle engine captures steps; others are captured when they are wanted again."""


class Runs(Protocol):
    """What is asked of a Runner."""

    model: DecoderModel
    device: torch.device

    @property
    def prompt_inputs(self) -> PromptInputs: ...
    def result(self, tiles: int) -> Tensor: ...
    def capture(self, rows: int) -> AbstractContextManager[ops.Program]: ...
    def prompt_logits(
        self, inputs: Tensor, rows: int, room: int, every_row: bool, decoded: Tensor | None = None
    ) -> Tensor: ...


def beside(runner: Runs, prompts: Sequence[Prompt], run: SampledSteps) -> Tensor | None:
    """`Runner.prefill_beside`, on the runner's card."""
    counts = [len(p.ids) - p.start for p in prompts]
    tiles, size = ops.prompt_tiles(counts), next((size for size in MIXED_ROWS if size >= sum(counts)), 0)
    if not size or len(tiles) > _room(size):
        return None
    if size not in run.step.beside:  # which takes longer than a few steps gain, so not the first time
        run.step.beside[size] = True
        return None
    step = _captured(runner, run.step, size)
    if step is None:
        return None
    runner.model.rope.reach(max(len(p.ids) for p in prompts))
    inputs = torch.empty(step.inputs.shape, dtype=torch.int32)
    runner.prompt_inputs.put(inputs, prompts, tiles, size, _room(size), run.step.rows.shape[1])
    ops.to_device(inputs, runner.device, out=step.inputs)
    run.launch_in(step.program)
    return step.result[: len(prompts)].clone()


def prepare_beside(runner: Runs, steps: Sequence[DecodeStep]) -> bool:
    """`Runner.prepare_beside`: one of the programs that these decode steps lack. False: there are all that there is
    memory for."""
    for step in steps:
        for size in PREPARED:
            if step.beside.get(size, True) is True:
                return _captured(runner, step, size) is not None
    return False


def _room(size: int) -> int:
    """Tiles of a step of so many rows of prompts: more than one prompt has, for several shorter ones."""
    return max(4, 2 * filled_up(ops.prompt_tiles([size])))


def _captured(runner: Runs, step: DecodeStep, size: int) -> MixedStep | None:
    """The program, captured where it is not yet; None where there is no memory for it: the two steps need none."""
    known = step.beside.get(size, True)
    if known is True:
        try:
            known = _capture(runner, step, size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            known = False
        step.beside[size] = known
    return known or None


def _capture(runner: Runs, step: DecodeStep, size: int) -> MixedStep:
    rows, room = step.rows.shape[1], _room(size)
    nothing = torch.empty(sum(runner.prompt_inputs.sizes(size, room, rows)), dtype=torch.int32)
    runner.prompt_inputs.put(nothing, [], [], size, room, rows)
    inputs, idle, result = ops.to_device(nothing, runner.device), torch.zeros_like(step.rows), runner.result(room)
    idle[2] = IDLE
    runner.prompt_logits(inputs, size, room, every_row=False, decoded=idle)  # loads kernels; the run's rows stay
    with runner.capture(size + rows) as program:
        logits = runner.prompt_logits(inputs, size, room, every_row=False, decoded=step.rows)
        result.copy_(logits[:room])
        step.draw(logits[room:])
        if step.result.ndim == 2:
            step.result.copy_(logits[room:])
    return MixedStep(inputs, program, result)
