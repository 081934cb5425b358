"""Log-probabilities of a prompt's tokens by vLLM, as JSON: what `check_vllm.py` runs for each folder.

python scripts/vllm_logprobs.py FOLDER SITE < ids.json        SITE is vLLM's, first on PYTHONPATH
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def main() -> None:
    folder, site = sys.argv[1:]
    spare = Path(site) / "_extra"  # small packages, for where one is missing
    names = [path.name for path in spare.iterdir() if path.suffix == ""] if spare.is_dir() else []
    if any(importlib.util.find_spec(name) is None for name in names):
        sys.path.append(str(spare))
        os.environ["PYTHONPATH"] += os.pathsep + str(spare)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    ids = json.load(sys.stdin)
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=len(ids) + 8,
        max_num_seqs=4,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        attention_backend="FLASH_ATTN",
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    seen = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    print(json.dumps([places[token].logprob for token, places in seen]))


if __name__ == "__main__":
    main()
