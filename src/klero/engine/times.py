"""Where the time goes: in the parts of a step, and in the life of a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from klero.engine.outputs import RequestMetrics, RequestOutput

PARTS = ("schedule", "inputs", "forward", "sample", "finish")


class Observer(Protocol):
    """Is told of steps and requests as they go, by the thread that steps. It is quick, and does not raise."""

    def stepped(self, seconds: float) -> None:
        """A step got to its end."""

    def started(self, clock: RequestClock) -> None:
        """A request runs for the first time."""

    def drew(self, clock: RequestClock) -> None:
        """The first token of a request is there."""

    def ended(self, output: RequestOutput) -> None:
        """A request has ended, however it did."""


class StepTimes:
    """Seconds of each part of a step, added up over the steps that got to their end.

    seconds: by part. schedule: who computes what; inputs: the packed arrays and the rows; forward: the model; sample:
    rewriting and drawing; finish: text, ends, answers. num_steps; num_tokens: computed by the model; num_rows: sampled.
    observer: who is told as things happen, where somebody wants to know.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._last = 0.0
        self._laps = dict.fromkeys(PARTS, 0.0)
        self.reset()

    def reset(self) -> None:
        """Begin again at zero."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_steps = self.num_tokens = self.num_rows = 0

    def start(self) -> None:
        """Begin a step; one that was cut short before counts for nothing."""
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """End a part of the step."""
        now = perf_counter()
        self._laps[part], self._last = now - self._last, now

    def count(self, num_tokens: int, num_rows: int) -> None:
        """End the step: its laps enter the sums."""
        for part, seconds in self._laps.items():
            self.seconds[part] += seconds
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_rows += num_rows
        if self.observer is not None:
            self.observer.stepped(sum(self._laps.values()))

    def clock(self, num_prompt_tokens: int, arrived: float | None) -> RequestClock:
        """The clock of a request. arrived: when it was asked; None: now."""
        now = perf_counter() if arrived is None else arrived
        return RequestClock(now, num_prompt_tokens=num_prompt_tokens, observer=self.observer)

    def ended(self, outputs: Iterable[RequestOutput]) -> None:
        """Note the answers of requests that have ended."""
        if self.observer is not None:
            for output in outputs:
                self.observer.ended(output)

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """The fraction of each part; they add up to 1, or are all 0 before the first step."""
        total = self.total
        return {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}


@dataclass(eq=False)
class RequestClock:
    """Moments and counts of one request, on the monotonic clock of `time.perf_counter`, in seconds.

    arrived: when it was asked. started: when a choice of it first ran, None before. first_token: when the first token
    of any choice was there. num_prompt_tokens: of the prompt. observer: who is told of both, where somebody is.
    """

    arrived: float = field(default_factory=perf_counter)
    started: float | None = None
    first_token: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens: int = 0
    observer: Observer | None = None
    _last_step: int = -1

    def start(self, num_cached: int = 0) -> None:
        """Note that a choice runs, and how much of it was cached; only the first time counts."""
        if self.started is None:
            self.started, self.num_cached_tokens = perf_counter(), num_cached
            if self.observer is not None:
                self.observer.started(self)

    def take_part(self, step: int, num_prompt_tokens: int) -> None:
        """Count a choice's part in step number `step`, and the prompt tokens computed for it."""
        self.num_steps += step != self._last_step
        self._last_step = step
        self.num_prompt_tokens_computed += num_prompt_tokens

    def drew(self) -> None:
        """Note that a token is there; only the first time counts."""
        if self.first_token is None:
            self.first_token = perf_counter()
            if self.observer is not None:
                self.observer.drew(self)

    def metrics(self, num_prompt_tokens: int, num_generated_tokens: int) -> RequestMetrics:
        """The record of a request that ends now."""
        return RequestMetrics(
            seconds_queued=None if self.started is None else self.started - self.arrived,
            seconds_to_first_token=None if self.first_token is None else self.first_token - self.arrived,
            seconds_total=perf_counter() - self.arrived,
            num_prompt_tokens=num_prompt_tokens,
            num_generated_tokens=num_generated_tokens,
            num_prompt_tokens_computed=self.num_prompt_tokens_computed,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
        )
