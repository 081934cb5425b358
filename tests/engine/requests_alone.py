"""The requests of test_exactness.py, and what each gives alone: run as a process, this computes and prints that.

python requests_alone.py FOLDER DEVICE DTYPE KV

Each request runs by itself, with nothing in the cache before it.
"""

import json
import random
import sys
from typing import Any

from nibblelm import LLM, GenerationOutput, SamplingParams

COUNT = 40
VOCABULARY = 331


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share beginnings of all lengths, each with a kind of sampling and a length of its own."""
    rng = random.Random(11)
    bases = [[rng.randrange(VOCABULARY) for _ in range(300)] for _ in range(3)]
    kinds: list[dict[str, Any]] = [
        dict(temperature=0),
        dict(temperature=1.0, top_p=1.0),
        dict(temperature=0.8, top_p=0.9, top_k=50),
        dict(temperature=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
        dict(temperature=0, logit_bias={5: 4.0, 9: float("-inf")}),
        dict(temperature=0.7, logprobs=2),
        dict(temperature=0, prompt_logprobs=1),
        dict(temperature=0, stop_token_ids=list(range(0, VOCABULARY, 23))),
        dict(temperature=0.9, stop_token_ids=list(range(0, VOCABULARY, 7)), min_tokens=5),
    ]
    made: list[tuple[list[int], dict[str, Any]]] = []
    for i in range(COUNT):
        base = rng.choice(bases)
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 3, 17, 40)))]
        prompt = base[: rng.choice((1, 5, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300))] + own
        params = kinds[i % len(kinds)] | dict(seed=i, max_tokens=rng.choice((1, 2, 7, 30, 70, 100)), ignore_eos=True)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        made.append((prompt, params))
    return made


def result(output: GenerationOutput) -> Any:
    """What has to be the same to the bit, as JSON gives it back."""
    scores = [output.logprobs, output.prompt_logprobs]
    lists = [s and [t and (t.token_id, t.logprob, t.top) for t in s] for s in scores]
    return json.loads(json.dumps([output.token_ids, output.finish_reason, lists]))


def main() -> None:
    folder, device, dtype, kv = sys.argv[1:]
    results = []
    for prompt, params in requests():
        llm = LLM(folder, device, dtype, kv=kv, max_sequences=1)
        results.append(result(llm.generate([prompt], SamplingParams(**params))[0]))
        llm.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
