"""HTTP beside the engine under it: `python -m benchmarks.server` (toy model), `--model smollm2`, `--rounds 5`.

The server is a process of its own, the clients another, over loopback: both share the cores. What is compared:

- streamed tokens/s of so many clients at once, beside `LLM.generate` on the same requests;
- seconds to the first token of one request alone, and the median gap between two tokens of a stream with so many
  streams at once, each beside `AsyncLLM.stream` without HTTP.

Candidates take turns, medians over the rounds are the result. Appends to benchmarks/results/server.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from klero import LLM, AsyncLLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "server.jsonl"
VOCAB = {"toy": 257, "smollm2": 40000}


class Load(NamedTuple):
    """What is asked: so many streams at once, of so many tokens each."""

    model: str
    streams: int
    tokens: int
    prompt_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        first = 1 if self.model == "toy" else 100
        return [[draw.randrange(first, VOCAB[self.model] - 1) for _ in range(self.prompt_tokens)]
                for _ in range(self.streams)]  # fmt: skip

    def fields(self, i: int) -> dict[str, Any]:
        return {"temperature": 1.0, "top_p": 0.9, "seed": i, "max_tokens": self.tokens, "ignore_eos": True}


class Took(NamedTuple):
    """Seconds of one round: in all, to the first token of the median stream, and between two tokens of one stream."""

    seconds: float
    first: float
    gap: float

    @classmethod
    def of(cls, begin: float, times: list[list[float]], tokens: int) -> Took:
        """times: of every token of every stream."""
        for stream in times:
            if len(stream) != tokens:
                raise RuntimeError(f"a stream brought {len(stream)} tokens instead of {tokens}")
        gaps = [b - a for stream in times for a, b in itertools.pairwise(stream)]
        return cls(
            max(stream[-1] for stream in times) - begin,
            statistics.median(stream[0] for stream in times) - begin,
            statistics.median(gaps) if gaps else 0.0,
        )


def make_llm(model: str, streams: int) -> LLM:
    """The LLM of both sides."""
    if model == "toy":
        from tests.server.live import TOKENIZER

        from klero.testing.models import PagedToyModel

        toy = PagedToyModel(vocab_size=257, max_model_len=1024, end_token_ids=(256,))
        return LLM(toy, tokenizer=TOKENIZER, block_size=16, num_blocks=64 * streams, max_num_seqs=streams)
    return LLM("smollm2", dtype="bfloat16", threads=2, max_num_seqs=streams, enable_prefix_caching=False)


class Client(asyncio.Protocol):
    """One stream: the times at which its events came."""

    def __init__(self, request: bytes) -> None:
        self.request, self.times, self.tail = request, list[float](), b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now, data = time.perf_counter(), self.tail + data
        events = data.split(b"\n\n")
        self.tail = events.pop()
        for event in events:
            if b"data: {" in event:
                self.times += [now] * len(json.loads(event[event.index(b"data: ") + 6 :])["choices"][0]["token_ids"])
            elif b"data: [DONE]" in event and not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server closed the connection: {self.tail!r:.300}"))


async def over_http(url: str, load: Load, seed: int) -> Took:
    """One round through the server."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    requests = []
    for i, prompt in enumerate(load.prompts(seed)):
        body = json.dumps({"prompt": prompt, "stream": True, "return_token_ids": True, **load.fields(i)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    loop, begin = asyncio.get_running_loop(), time.perf_counter()
    made = [await loop.create_connection(partial(Client, request), host, int(port)) for request in requests]
    await asyncio.gather(*(client.done for _, client in made))
    for transport, _ in made:
        transport.close()
    return Took.of(begin, [client.times for _, client in made], load.tokens)


async def in_process(llm: AsyncLLM, load: Load, seed: int) -> Took:
    """The same without HTTP."""

    async def one(i: int, prompt: list[int]) -> list[float]:
        times: list[float] = []
        async for delta in llm.stream(prompt, SamplingParams(**load.fields(i))):
            times += [time.perf_counter()] * len(delta.token_ids)
        return times

    begin = time.perf_counter()
    return Took.of(begin, await asyncio.gather(*(one(i, p) for i, p in enumerate(load.prompts(seed)))), load.tokens)


def generate(llm: LLM, load: Load, seed: int) -> float:
    """Seconds of `LLM.generate`."""
    begin = time.perf_counter()
    llm.generate(load.prompts(seed), [SamplingParams(**load.fields(i)) for i in range(load.streams)])
    return time.perf_counter() - begin


@contextlib.contextmanager
def server(model: str, streams: int) -> Iterator[str]:
    """A server in a process of its own; its address."""
    command = [sys.executable, "-m", "benchmarks.server", "--model", model, "--streams", str(streams), "--serve"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=machine.ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"on (http://\S+)", line):
                yield found[1]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of all rounds, and their ratios."""
    many = Load(options.model, options.streams, options.tokens, options.prompt_tokens)
    alone = many._replace(streams=1, tokens=4)
    took: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        took.setdefault(name, []).append(value)

    with server(options.model, options.streams) as url, make_llm(options.model, options.streams) as llm:
        for seed in range(options.rounds + 1):  # the first warms up
            if seed == 1:
                took.clear()
            print(f"round {seed} of {options.rounds}", file=sys.stderr, flush=True)
            note("generate", generate(llm, many, seed))
            for name, load in (("many", many), ("alone", alone)):
                for turn in range(1 if name == "many" else 5):
                    http = asyncio.run(over_http(url, load, 1000 * turn + seed))
                    own = asyncio.run(_own(llm, load, 1000 * turn + seed))
                    for way, one in (("http", http), ("engine", own)):
                        for field in Took._fields:
                            note(f"{name} {way} {field}", getattr(one, field))
    medians = {name: statistics.median(values) for name, values in took.items()}
    return {"medians": medians, **ratios(medians, many)}


async def _own(llm: LLM, load: Load, seed: int) -> Took:
    async with AsyncLLM(llm) as own:
        return await in_process(own, load, seed)


def ratios(medians: dict[str, float], many: Load) -> dict[str, float]:
    """The figures that docs/performance.md tells."""
    drawn = many.streams * many.tokens
    return {
        "tokens/s over HTTP": drawn / medians["many http seconds"],
        "tokens/s, AsyncLLM.stream": drawn / medians["many engine seconds"],
        "tokens/s, LLM.generate": drawn / medians["generate"],
        "throughput, HTTP over generate": medians["generate"] / medians["many http seconds"],
        "first token alone, HTTP over engine": medians["alone http first"] / medians["alone engine first"],
        "ms that HTTP adds between tokens": 1e3 * (medians["many http gap"] - medians["many engine gap"]),
    }


def main() -> None:
    """Measure, print and append; or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("toy", "smollm2"), default="toy")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="be the server: what the benchmark starts")
    options = parser.parse_args()
    if options.serve:
        from klero.server import ServerOptions
        from klero.server.run import serve

        sys.exit(serve(make_llm(options.model, options.streams), ServerOptions(port=0)))
    load = machine.load_average()
    result = measure(options)
    for name, value in result.items():
        if name != "medians":
            print(f"{value:10.3f}  {name}")
    about = {"date": datetime.date.today().isoformat(), "load": load, **vars(options), **machine.describe(2)}
    with RESULTS.open("a") as file:
        file.write(json.dumps(about | result) + "\n")


if __name__ == "__main__":
    main()
