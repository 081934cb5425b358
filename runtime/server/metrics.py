"""GET /metrics: the engine's counters for Prometheus, by the names that vLLM's have."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nibblelm.server.service import Service
from nibblelm.stats import Histogram


class Metrics(Collector):
    """What one service shows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format, as text/plain."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine = self._service.llm.engine
        stats, scheduler = engine.stats, engine.scheduler
        pool = scheduler.pool
        running, paused = sum(not s.parked for s in list(scheduler.running)), engine.paused
        gauges = {
            "num_requests_running": ("Outputs that are being computed", running),
            "num_requests_waiting": ("Outputs that wait for a slot or for pages", engine.unfinished - running - paused),
            "num_requests_paused": ("Outputs that sit out: who reads is behind", paused),
            "kv_cache_usage_perc": ("Share of the pages in use, 0 to 1", 1 - pool.available / pool.count),
            "engine_stalled_seconds": ("Time without a step though there is something to compute", stats.stalled_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"nibblelm:{name}", text, max(0, value))
        counters = {
            "prompt_tokens": ("Prompt tokens of outputs that were begun", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache", stats.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache", stats.found_tokens),
            "num_preemptions": ("Outputs that gave up their pages and were computed again", scheduler.preemptions),
            "spec_decode_num_drafts": ("Drafts computed", stats.drafts),
            "spec_decode_num_draft_tokens": ("Their tokens", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Of these, tokens that were right", stats.accepted_tokens),
            "engine_steps": ("Steps computed", stats.steps),
            "admission_rejections": ("Requests refused because the queue was full", self._service.refused),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"nibblelm:{name}", text, value)
        finished = CounterMetricFamily("nibblelm:request_success", "Outputs that ended", labels=["finished_reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        histograms = {
            "time_to_first_token_seconds": ("From arrival in the engine to the first token", stats.first_token),
            "inter_token_latency_seconds": ("Between two tokens of an output", stats.inter_token),
            "e2e_request_latency_seconds": ("From arrival in the engine to the last token", stats.end_to_end),
            "request_queue_time_seconds": ("Before a prompt was begun", stats.queue),
            "request_prefill_time_seconds": ("From there to the first token", stats.prefill),
            "request_decode_time_seconds": ("From the first token to the last", stats.decode),
        }
        for name, (text, histogram) in histograms.items():
            yield _family(f"nibblelm:{name}", text, histogram)


def _family(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, sum_of_counts = [], 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
        sum_of_counts += count
        buckets.append((bound, sum_of_counts))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)
