"""Whether vLLM opens the folders that `convert` writes, and computes what we do: 200 tokens' log-probabilities.

    python scripts/check_vllm.py --site SITE [--device cuda] [--json vllm_folders.json]

Converts the demo model by every method, and in other formats by one, and compares vLLM's log-probabilities of a story's
tokens with those of `LLM(folder, dtype="bf16")`. vLLM has a process for each folder, one on each card at a time, with
SITE first on its path. A folder that it does not open is a row with the end of its message; one that --limit leaves no
time for is none, so that a record keeps what it had. Exits with 1 where one is not opened or not read in time, or the
mean difference is over 0.02, a few times the error of bf16.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rows import Rows

import nibblelm
from nibblelm.tokenizer import load_tokenizer

DEMO = Path(__file__).resolve().parent.parent / "demo"
READER = Path(__file__).with_name("vllm_logprobs.py")
TOKENS = 200
MOST = 0.02
FOLDERS: dict[str, dict[str, Any]] = {
    "minmax": dict(method="minmax"),
    "mse": dict(method="mse"),
    "gptq": dict(method="gptq"),
    "awq": dict(method="awq"),
    "rotate gptq": dict(method="gptq", rotate=True),
    "mse, int4 per row": dict(method="mse", group_size=-1),
    "mse, int8 per row": dict(method="mse", bits=8),
    "mse, symmetric, 16-bit head": dict(method="mse", symmetric=True, keep=["lm_head=16"]),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
}


def made(name: str, work: Path, device: str) -> Path:
    """The folder of that name, converted where it is not there yet."""
    folder = work / name.replace(", ", "-").replace(" ", "-")
    if not folder.exists():
        options = FOLDERS[name]
        calibrated: dict[str, Any] = dict(device=device, samples=16) if options["method"] in ("gptq", "awq") else {}
        nibblelm.convert(DEMO / "stories-7m", folder, **options, **calibrated)
    return folder


def our_logprobs(folder: Path, ids: list[int], device: str) -> torch.Tensor:
    """(len(ids) - 1,) fp32: of each token after the first."""
    llm = nibblelm.LLM(folder, device, "bf16", max_sequences=1)
    scores = llm.logits(ids).float().cpu().log_softmax(-1)
    llm.close()
    return scores[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def their_logprobs(folder: Path, ids: list[int], site: str, card: str, limit: float) -> torch.Tensor | str | None:
    """The same by vLLM, or why not; None where `limit` seconds were not enough."""
    paths = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    places = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": card, "VLLM_CACHE_ROOT": str(folder.parent / "cache")}
    environment = os.environ | ENVIRONMENT | places
    command = [sys.executable, str(READER), str(folder), site]
    try:
        result = subprocess.run(
            command,
            env=environment,
            input=json.dumps(ids),
            capture_output=True,
            text=True,
            timeout=max(limit, 1),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    answers = [line for line in result.stdout.splitlines() if line.startswith("[")]
    if result.returncode or not answers:
        return f"exit code {result.returncode}: {result.stderr[-1200:]}"
    return torch.tensor(json.loads(answers[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--folder", nargs="+", choices=tuple(FOLDERS), default=list(FOLDERS), metavar="NAME")
    parser.add_argument("--device", default="cuda", help="ours (cuda)")
    parser.add_argument("--work", type=Path, default=Path("out/vllm"))
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds of all (300)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES")
    args = parser.parse_args()
    begun, rows, good = time.monotonic(), Rows(args.json, ("folder", "tree"), tree=args.tree), True
    folders = {name: made(name, args.work.resolve(), args.device) for name in args.folder}
    text = (DEMO / "calibration.txt").read_text().split("<|endoftext|>")
    tokenizer = load_tokenizer(DEMO / "stories-7m")
    assert tokenizer is not None
    ids = tokenizer.encode("\n".join(text[:4]))[: TOKENS + 1]
    cards = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    free: SimpleQueue[str] = SimpleQueue()
    for card in cards:
        free.put(card)

    def theirs(folder: Path) -> torch.Tensor | str | None:
        card = free.get()
        try:
            limit = args.limit - (time.monotonic() - begun)
            return their_logprobs(folder, ids, str(args.site.resolve()), card, limit)
        finally:
            free.put(card)

    ours = {name: our_logprobs(folder, ids, args.device) for name, folder in folders.items()}
    with ThreadPoolExecutor(len(cards)) as pool:
        for name, found in zip(folders, pool.map(theirs, folders.values()), strict=True):
            facts = {"folder": name, "tokens": len(ids) - 1}
            if found is None:
                print(f"{name}: not read within {args.limit:.0f} s of all")
                good = False
            elif isinstance(found, str):
                rows.add(**facts, opened=False, message=found)
                good = False
            else:
                difference = (found - ours[name]).abs()
                row = rows.add(**facts, opened=True, mean=float(difference.mean()), most=float(difference.max()))
                good &= row["mean"] <= MOST
    print(f"{len(folders)} folders in {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
