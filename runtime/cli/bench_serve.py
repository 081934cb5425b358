"""`nibblelm bench serve`: a server under load, as its users see it."""

import argparse
import json
import math

from nibblelm.cli.options import needing_extra, number, positive

_RATE = number(float, "above 0", lambda value: value > 0)
HELP = "measure a server with OpenAI's API, this or any other, under load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="http://HOST:PORT")
    parser.add_argument("--served-model", metavar="NAME", help="model to ask for (default: the first that is listed)")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="how many to send (200)")
    parser.add_argument("--rate", type=_RATE, default=math.inf, metavar="R", help="arrivals a second (all at once)")
    parser.add_argument("--concurrency", type=positive, default=64, metavar="C", help="most at a time (64)")
    parser.add_argument("--prompt-mean", type=positive, default=220, metavar="N", help="words of a prompt (220)")
    parser.add_argument("--answer-mean", type=positive, default=200, metavar="N", help="tokens of an answer (200)")
    parser.add_argument("--longest-prompt", type=positive, metavar="N", help="(1024, or what the context holds)")
    parser.add_argument("--longest-answer", type=positive, metavar="N", help="(1024, or what the context holds)")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of full length, where a server knows that")
    parser.add_argument("--ttft-goal", type=_RATE, default=200.0, metavar="MS", help="for goodput (200)")
    parser.add_argument("--tpot-goal", type=_RATE, default=10.0, metavar="MS", help="for goodput (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import asyncio

    with needing_extra("serve"):
        from nibblelm.server.bench import Load, measured, summary

    load = Load(
        requests=args.requests,
        rate=args.rate,
        concurrency=args.concurrency,
        prompt_mean=args.prompt_mean,
        answer_mean=args.answer_mean,
        longest_prompt=args.longest_prompt,
        longest_answer=args.longest_answer,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
    )
    results, took_s = asyncio.run(measured(args.url, args.served_model, args.api_key, load))
    figures = summary(results, took_s, args.ttft_goal / 1000, args.tpot_goal / 1000)
    if args.json:
        rate = None if math.isinf(load.rate) else load.rate
        print(json.dumps({"url": args.url, "rate": rate, "concurrency": load.concurrency, "seed": load.seed} | figures))
        return 0
    print(f"requests         {figures['requests']}, {figures['failed']} failed, in {took_s:.1f} s")
    for error in figures["errors"]:
        print(f"                 {error}")
    print(f"answered         {figures['requests_s']:.2f} requests/s")
    print(f"tokens           {figures['prompt_tokens_s']:.0f} prompt/s, {figures['output_tokens_s']:.0f} output/s")
    goals = f"first token in {args.ttft_goal:g} ms, {args.tpot_goal:g} ms a token"
    print(f"goodput          {figures['goodput_s']:.2f} requests/s, {100 * figures['goodput_share']:.0f} % ({goals})")
    print("ms                    p50      p90      p99")
    for name, text in (
        ("ttft_ms", "first token"),
        ("itl_ms", "between tokens"),
        ("tpot_ms", "a token"),
        ("e2e_ms", "whole answer"),
    ):
        print(f"{text:<16} {'  '.join('      -' if v is None else f'{v:7.1f}' for v in figures[name].values())}")
    return 0
