"""`nibblelm bench serve` against this server: what it counts is what the server counts."""

import json
import random
import statistics
from typing import Any

import numpy as np
import pytest

from nibblelm.cli import main
from nibblelm.server.bench import length, percentile


def test_figures_agree_with_the_servers_own(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.metrics()
    sizes = ["--prompt-mean", "20", "--answer-mean", "15", "--longest-prompt", "200", "--longest-answer", "40"]
    load = ["--requests", "40", "--rate", "60", "--concurrency", "8", "--ignore-eos", *sizes]
    assert (
        main(["bench", "serve", "--url", server.url, *load, "--json", "--ttft-goal", "1e6", "--tpot-goal", "1e6"]) == 0
    )
    figures = json.loads(capsys.readouterr().out)
    seen = {name: value - before[name] for name, value in server.metrics().items()}
    assert (figures["requests"], figures["failed"], figures["errors"]) == (40, 0, [])
    assert figures["output_tokens_s"] * figures["seconds"] == pytest.approx(seen["generation_tokens_total"])
    assert figures["prompt_tokens_s"] * figures["seconds"] == pytest.approx(seen["prompt_tokens_total"])
    assert figures["goodput_share"] == 1
    assert figures["goodput_s"] == figures["requests_s"]
    assert figures["seconds"] > 20 / 60  # arrivals took their time
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    whole = seen["e2e_request_latency_seconds_sum"] / 40 * 1000
    assert figures["e2e_ms"]["p99"] > whole * 0.9


def test_errors_are_counted_and_goals_judged(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "6", "--prompt-mean", "900", "--longest-answer", "200", "--ttft-goal", "0.001"]
    assert main(["bench", "serve", "--url", f"{server.url}/v1/", *options]) == 0
    shown = capsys.readouterr().out
    assert "RequestError: status 400" in shown
    assert "0 %" in shown
    for given, message in (
        (["--url", "ftp://x"], "supported: http://HOST:PORT"),
        (["--url", "http://127.0.0.1:99999"], "supported: http://HOST:PORT"),
        (["--url", "http://[::1"], "supported: http://HOST:PORT"),
        (["--url", "http://a..b"], "cannot be reached"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", server.url, "--served-model", "other"], "none of 200 requests was answered"),
    ):
        assert main(["bench", "serve", *given]) == 1
        assert message in capsys.readouterr().err
    assert main(["bench"]) == 1
    assert "say what to measure" in capsys.readouterr().err


def test_lengths_and_percentiles() -> None:
    rng = random.Random(1)
    lengths = [length(rng, 220, 1.25, 100_000) for _ in range(50_000)]
    assert statistics.fmean(lengths) == pytest.approx(220, rel=0.03)
    assert min(lengths) == 4
    values = [rng.random() for _ in range(101)]
    for percent in (1, 50, 90, 99, 100):
        assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")
