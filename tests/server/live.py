"""A live server on a toy model, in a thread, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import httpx2
from tests.engine.gated import Gated

from klero import AsyncLLM
from klero.engine import LLM
from klero.server import ServerOptions
from klero.server.run import Server
from klero.testing.models import PagedToyModel

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """Bytes as tokens, and <end> behind them."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "seed": 1}
OPTIONS = {"block_size": 4, "num_blocks": 512, "max_num_seqs": 16}


def toy(model=None, **options):
    """An LLM on a model of bytes: its text is noise, and the same noise for the same request."""
    model = model or PagedToyModel(vocab_size=257, end_token_ids=(256,))
    return LLM(model, tokenizer=TOKENIZER, **(OPTIONS | options))


class Counting(AsyncLLM):
    """Counts what the engine has been asked."""

    num_asked = 0

    def __init__(self, llm):
        super().__init__(llm)
        submit = self._loop.submit

        def counted(asked):
            told = submit(asked)
            self.num_asked += 1
            return told

        self._loop.submit = counted


class Live:
    """A server that runs. url; llm: what it serves; options: those of the server. `with` starts and stops it."""

    def __init__(self, make=toy, **options):
        self._make = make
        self.server = Server(ServerOptions(**({"port": 0, "served_model_name": "toy"} | options)))
        self.url, self.code = self.server.url, None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        def load():
            self.llm = self._make()
            self.aio = Counting(self.llm)
            return self.aio

        self.code = self.server.run(load)

    def __enter__(self):
        self.start()
        self.wait_for("ready")
        return self

    def start(self):
        if self._thread.ident is None:
            self._thread.start()

    def wait_for(self, state):
        end = time.monotonic() + 60
        while self.server.service.state != state or self.get("/health") is None:
            assert self._thread.is_alive(), "the server has ended"
            assert time.monotonic() < end
            time.sleep(0.01)

    def __exit__(self, *_):
        self.server.stop()
        self.join()

    def join(self, seconds=30):
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server does not end"

    def wait_until_asked(self, number):
        """Wait until the engine was asked so many requests in all, though it may not have let them in."""
        end = time.monotonic() + 20
        while self.aio.num_asked < number:
            assert time.monotonic() < end
            time.sleep(0.001)

    def get(self, path, **options):
        """The answer to a GET; None while nobody answers."""
        with contextlib.suppress(httpx2.ConnectError):
            return httpx2.get(self.url + path, timeout=30, verify=False, **options)

    def post(self, path, body, **options):
        """The answer to a POST of a JSON body, or of bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return httpx2.post(self.url + path, content=data, headers=headers, timeout=30, verify=False, **options)

    def complete(self, **body):
        """The object that answers POST /v1/completions."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path, body):
        """What is streamed: the data of each event; comments are left out."""
        return events_of(self.post(path, {**body, "stream": True}).text)

    def all_free(self, seconds=5.0):
        """Wait until the engine holds nothing; it must, soon."""
        engine, end = self.llm.engine, time.monotonic() + seconds
        while engine.num_unfinished or engine.sampler.slots.num_free < engine.sampler.slots.num_slots:
            assert time.monotonic() < end, f"{engine.num_unfinished} requests are left"
            time.sleep(0.005)
        assert engine.kv is None or engine.kv.blocks.num_free == engine.kv.blocks.num_blocks


class Asking(threading.Thread):
    """A client that asks in a thread of its own; made, the engine has its request. answer: None if it broke off."""

    def __init__(self, live, **body):
        super().__init__(daemon=True)
        self.live, self.body, self.answer = live, body, None
        before = live.aio.num_asked
        self.start()
        live.wait_until_asked(before + 1)

    def run(self):
        with contextlib.suppress(httpx2.TransportError):
            self.answer = self.live.post(COMPLETIONS, {**LONG, **self.body})


@contextlib.contextmanager
def gated(**options):
    """A live server whose model, `model`, steps only when the test lets it."""
    model = Gated(vocab_size=257)
    live = Live(lambda: toy(model), **options)
    live.model = model
    live.start()
    live.wait_for("ready")
    try:
        yield live
    finally:
        model.steps.release(10_000)
        live.server.stop()
        live.join()


class Dying(Gated):
    """A model whose fifth step ends the engine's thread."""

    def forward(self, step):
        if len(self.seen) == 4:
            raise SystemExit
        return super().forward(step)


def events_of(text):
    """The data of the events of a stream, "[DONE]" included."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert not block or block.startswith(":"), block
    return found
