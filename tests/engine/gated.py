"""A model that computes a step when the test says so."""

from __future__ import annotations

import asyncio
import threading

from klero.testing.models import PagedToyModel


class Gated(PagedToyModel):
    """`steps.release()` lets a step go; `at_gate.acquire()` waits until one is due. seen: sequences of each step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps, self.at_gate, self.seen = threading.Semaphore(0), threading.Semaphore(0), []

    def forward(self, step):
        self.seen.append(len(step.slots))
        self.at_gate.release()
        assert self.steps.acquire(timeout=10)
        return super().forward(step)

    async def wait_for_step(self, number):
        """Wait until step number 1, 2, ... is due."""
        while len(self.seen) < number:
            await asyncio.sleep(0.001)
