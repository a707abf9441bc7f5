"""Figures for Prometheus: of requests and steps as they go, and the engine's own as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from klero.engine import Engine, RequestOutput
from klero.engine.times import RequestClock
from klero.finish import FinishReason

CONTENT_TYPE = CONTENT_TYPE_LATEST
REASONS = tuple(str(reason) for reason in FinishReason)
_TO_FIRST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STEP = (*_BETWEEN, 5, 10, 30, 60)


class Metrics:
    """The figures of one server, in a registry of its own. An `Observer` of its engine."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._requests = Counter(
            "klero_requests", "HTTP requests, by route and outcome.", ["route", "outcome"], registry=own
        )
        self._open = Gauge("klero_http_requests_running", "HTTP requests that are being answered.", registry=own)
        self._prompt = Counter("klero_prompt_tokens", "Tokens of prompts that began to run.", registry=own)
        self._cached = Counter("klero_prompt_tokens_cached", "Those of them that were cached.", registry=own)
        self._choices = Counter("klero_choices", "Choices that have ended, by reason.", ["reason"], registry=own)
        self._ends = {reason: self._choices.labels(reason) for reason in REASONS}

        def seconds(name: str, text: str, buckets: Sequence[float] = _TO_FIRST) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=own)

        self._steps = seconds("klero_step_duration_seconds", "Of a step of the engine, all its parts.", _STEP)
        self._queued = seconds("klero_queue_seconds", "From the request until it first ran.")
        self._to_first = seconds("klero_time_to_first_token_seconds", "From the request until its first token.")
        self._whole = seconds("klero_request_seconds", "From the request until its end, however it ended.")
        self._between = seconds(
            "klero_time_per_token_seconds", "Between tokens of a choice, the mean of each request.", _BETWEEN
        )

    def watch(self, engine: Engine) -> None:
        """Tell of this engine from now on; it tells of its steps and requests as they go."""
        engine.times.observer = self
        self.registry.register(_EngineCollector(engine))

    def began(self) -> None:
        """Count an HTTP request that begins."""
        self._open.inc()

    def closed(self, route: str, outcome: str) -> None:
        """Count an HTTP request that has ended: "answered", "refused", "busy", "failed" or "left"."""
        self._open.dec()
        self._requests.labels(route, outcome).inc()

    def stepped(self, seconds: float) -> None:
        """Take the time of a step."""
        self._steps.observe(seconds)

    def started(self, clock: RequestClock) -> None:
        """Take the tokens of a prompt that begins to run, and how long it waited."""
        assert clock.started is not None
        self._prompt.inc(clock.num_prompt_tokens)
        self._cached.inc(clock.num_cached_tokens)
        self._queued.observe(clock.started - clock.arrived)

    def drew(self, clock: RequestClock) -> None:
        """Take the time to a first token, as soon as it is there."""
        assert clock.first_token is not None
        self._to_first.observe(clock.first_token - clock.arrived)

    def ended(self, output: RequestOutput) -> None:
        """Take the times and reasons of a prompt whose choices have ended, well or not."""
        cost = output.metrics
        self._whole.observe(cost.seconds_total)
        for choice in output.outputs:
            self._ends[choice.finish_reason].inc()
        longest = max(len(choice.token_ids) for choice in output.outputs)
        if cost.seconds_to_first_token is not None and longest > 1:
            self._between.observe((cost.seconds_total - cost.seconds_to_first_token) / (longest - 1))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads an engine when it is asked. The engine's thread may be in a step: numbers may be a step apart."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        engine = self._engine
        scheduler, times = engine.scheduler, engine.times
        yield _gauge("klero_sequences_running", "Choices that run.", len(scheduler.running))
        yield _gauge("klero_sequences_waiting", "Choices that wait.", len(scheduler.waiting))
        yield _counter("klero_preemptions", "Choices that made room for others.", scheduler.num_preemptions)
        yield _counter("klero_generated_tokens", "Tokens drawn.", engine.num_generated)
        yield _counter("klero_computed_tokens", "Tokens that the model computed.", times.num_tokens)
        yield _counter("klero_steps", "Steps of the engine.", times.num_steps)
        parts = CounterMetricFamily("klero_step_seconds", "Seconds of the steps, by part.", labels=["part"])
        for part, seconds in times.seconds.items():
            parts.add_metric([part], seconds)
        yield parts
        if engine.kv is not None:
            blocks = engine.kv.blocks
            yield _gauge("klero_kv_blocks", "Blocks of the KV cache.", blocks.num_blocks)
            yield _gauge("klero_kv_blocks_used", "Those that sequences hold.", blocks.num_blocks - blocks.num_free)
            yield _counter("klero_prefix_cache_queries", "Blocks looked up in the prefix cache.", blocks.num_queries)
            yield _counter("klero_prefix_cache_hits", "Those that were found.", blocks.num_hits)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
