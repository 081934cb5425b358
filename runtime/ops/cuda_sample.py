"""CUDA sampling: check what came, call the launcher. The contract is in `ops`."""

import torch
from torch import Tensor

from nibblelm.ops.cuda_device import kernels, launch_args
from nibblelm.ops.cuda_ops import address, require_arguments, vector
from nibblelm.ops.sampling_state import SamplingState


def sample(
    logits: Tensor,
    state: SamplingState,
    out: Tensor | None = None,
    positions: Tensor | None = None,
    host_ids: Tensor | None = None,
    blocks: int = 0,
) -> Tensor:
    """`blocks` of a row, 1 to 8, are for tests; 0 goes by its length."""
    m, vocab = logits.shape
    require_arguments(
        logits.dtype == torch.float32 and logits.stride(1) == 1 and state.rows == m and state.vocab_size in {0, vocab}
        and vector(out, m, torch.int32) and vector(positions, m, torch.int32)
        and (host_ids is None or (vector(host_ids.view(-1), 2 * m, torch.int32) and host_ids.is_pinned())),
        "sample", f"logits ({state.rows}, {state.vocab_size or 'V'}) fp32, out and positions (M,) int32, "
        "host_ids (2, M) int32, pinned", logits, out, positions, host_ids,
    )  # fmt: skip
    ids = torch.empty(m, dtype=torch.int32, device=logits.device) if out is None else out
    workspace = torch.empty(m, vocab, dtype=torch.float32, device=logits.device)
    args = kernels.SamplingArgs(
        logits=logits.data_ptr(), workspace=workspace.data_ptr(), ids=ids.data_ptr(), positions=address(positions),
        host_ids=address(host_ids), logits_stride=logits.stride(0), rows=m, vocab=vocab, blocks=blocks,
        **{name: address(t) for name, t in state.tensors().items()},
    )  # fmt: skip
    kernels.sample(args, *launch_args())
    return ids


def mask_logits(x: Tensor, mask: Tensor) -> Tensor:
    words = (x.shape[0], -(-x.shape[1] // 32))
    require_arguments(
        x.dtype == torch.float32 and x.stride(1) == 1 and mask.shape == words and mask.dtype == torch.int32
        and mask.is_contiguous(),
        "mask_logits", f"x (M, V) fp32, mask {words} int32", x, mask,
    )  # fmt: skip
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    kernels.mask_logits(x.data_ptr(), mask.data_ptr(), y.data_ptr(), *x.shape, x.stride(0), *launch_args())
    return y
