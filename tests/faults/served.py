"""A live server whose model says what a test wants, for the cases from the field that need HTTP."""

from __future__ import annotations

import copy
import json
import threading
import time

import httpx2
import numpy as np
from tests.server.live import OPTIONS, Live
from tests.server.toys import put_together

from klero.engine import LLM
from klero.finish.pieces import _BYTE_OF_LETTER
from klero.testing.models import PagedToyModel

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LETTER_OF_BYTE = {byte: letter for letter, byte in _BYTE_OF_LETTER.items()}
BYTES = [bytes([_BYTE_OF_LETTER[letter]]) for letter in sorted(_BYTE_OF_LETTER)]
PIECES = [
    b"al", b"pha be", b"ta gam", b"ma", b"Hello", b" wor", b"ld ST", b"ART", b"\x20\xf0\x9f", b"\x98\x80", b"\x8f\x21",
    b"\xef\xbf\xbd", b" c", b"He", b"\xe2\x82", b"\xf0\x9f", b"wa", b"te", b"ter", b"water", b"yes", b"OP!!",
]  # fmt: skip
SPECIAL = ["<end>", "<stop>", "<|fin|>"]
MERGES = [("w", "a"), ("t", "e"), ("te", "r"), ("wa", "ter")]
ID = {data: i for i, data in enumerate([*BYTES, *PIECES, *(text.encode() for text in SPECIAL)])}
WIDTH = len(ID)
END, OTHER_END = ID[b"<end>"], ID[b"<stop>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who is that?') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% if m.tool_calls is defined %}({{ m.tool_calls | length }}){% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    '{% if tools %}{# <tool_call>{"name": n, "arguments": {}}</tool_call> #}{% endif %}'
)
USER = [{"role": "user", "content": "Hi"}]
NUM_USER = len("[user]Hi")


def make_tokenizer():
    """Bytes, pieces that only ids bring (but for "water", which the text brings), and special tokens."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"".join(LETTER_OF_BYTE[byte] for byte in data): ID[data] for data in [*BYTES, *PIECES]}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(*pieces):
    """Ids of pieces, bytes or text of one token each; a longer text byte by byte."""
    found = []
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        found += [ID[data]] if data in ID else [ID[bytes([byte])] for byte in data]
    return found


class Puppet(PagedToyModel):
    """Noise, unless `table` [positions, V] is given: then the row after position p is table[p], its last ever after.

    gate: a semaphore that lets each step go; None: all go. seen: how many sequences each step had.
    """

    def __init__(self):
        super().__init__(vocab_size=WIDTH, end_token_ids=(END, OTHER_END))
        self.table, self.gate, self.seen = None, None, []

    def forward(self, step):
        """Noise is computed all the same, so that blocks hold what belongs there."""
        self.seen.append(len(step.slots))
        if (gate := self.gate) is not None:
            assert gate.acquire(timeout=10)
        rows = super().forward(step)
        if self.table is not None:
            rows = self.table[np.minimum(step.positions[step.logits_rows], len(self.table) - 1)].copy()
        return rows


class Quick(Live):
    """A server that is asked by one client, `http`, as a new one for each request takes its time."""

    def __init__(self, make, **options):
        self.http = httpx2.Client(timeout=30)
        super().__init__(make, **options)

    def __exit__(self, *error):
        self.http.close()
        super().__exit__(*error)

    def get(self, path, **options):
        """The answer to a GET."""
        return self.http.get(self.url + path, **options)

    def post(self, path, body, **options):
        """The answer to a POST of a JSON body, or of bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.http.post(self.url + path, content=data, headers=headers, **options)


class Stage(Quick):
    """A server on a Puppet."""

    def __init__(self):
        self.model = Puppet()
        super().__init__(lambda: LLM(self.model, tokenizer=make_tokenizer(), **OPTIONS))

    def noise(self):
        """Say noise, the same for the same request."""
        self.model.table, self.model.gate = None, None

    def rows(self, rows, at=0):
        """Give these logits after position at, at + 1, ...: {id: logit}; every other token is impossible."""
        table = np.full((at + len(rows), WIDTH), -np.inf, np.float32)
        for i, row in enumerate(rows):
            for token_id, logit in row.items():
                table[at + i, token_id] = logit
        table[:at] = table[at]
        self.model.table = table

    def says(self, script, num_prompt=1):
        """Say these tokens after a prompt of so many; the last one again and again. Nothing else is likely."""
        table = np.zeros((num_prompt - 1 + len(script), WIDTH), np.float32)
        table[np.arange(len(table)), [script[max(i - num_prompt + 1, 0)] for i in range(len(table))]] = 50
        self.model.table = table

    def both(self, body):
        """The whole answer to a body, seeded, and the events of its stream, which must add up to it in every field."""
        path, body = CHAT if "messages" in body else COMPLETIONS, {"seed": 0, **body}
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        *chunks, last, done = self.events(path, {**body, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        assert unnamed(put_together(chunks, len(whole["choices"]))) == unnamed(whole["choices"])
        assert last["choices"] == []
        tokens = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][name] for name in tokens] == [whole["usage"][name] for name in tokens]
        return whole, chunks

    def refused(self, body, status=400, path=None):
        """The error that a body gets, whole and streamed, and that the engine knows nothing of it."""
        path = path or (CHAT if "messages" in body else COMPLETIONS)
        steps, errors = len(self.model.seen), []
        for stream in (False, True):
            answer = self.post(path, {**body, "stream": stream})
            assert answer.status_code == status, answer.text
            errors.append(answer.json()["error"])
        assert errors[0] == errors[1]
        assert len(self.model.seen) == steps
        return errors[0]

    def wait_for_steps(self, number):
        """Wait until so many steps have begun in all."""
        wait_until(lambda: len(self.model.seen) >= number)

    def wait_for_running(self, number):
        """Wait until so many requests are being answered, as the server sees it."""
        wait_until(lambda: self.server.service.num_running == number)

    def close_gate(self):
        """Let no step go any more; the semaphore that lets them."""
        self.model.gate = threading.Semaphore(0)
        return self.model.gate


def wait_until(happened):
    """Wait for what must happen soon."""
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def unnamed(choices):
    """Choices without the names of their calls, which are made of the answer's own."""
    choices = copy.deepcopy(choices)
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return choices


def texts(chunks, index=0):
    """The pieces of text of one choice, as they were streamed."""
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
    return [part["text"] if "text" in part else part["delta"].get("content", "") for part in parts]
