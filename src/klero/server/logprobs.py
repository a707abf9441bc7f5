"""Logprobs as JSON: OpenAI's two shapes, and klero's own. -9999.0 stands for -inf; nothing that is NaN goes out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from klero.errors import ModelError
from klero.finish import TextStream, TokenBytes, text_of_prompt
from klero.finish.utf8 import Utf8Decoder, continues, pending_of_bytes
from klero.logprobs import Logprobs
from klero.params import SamplingParams

LEAST = -9999.0
EVERY_TOKEN = -1


def number(value: float) -> float:
    """A logprob as JSON has it: as it is in binary64, which reads back as the same binary32."""
    return LEAST if value == -math.inf else float(value)


class TokenTexts:
    """Tokens as text and bytes. vocabulary: None: tokens have no text. hides: special tokens are not shown."""

    def __init__(self, vocabulary: TokenBytes | None, hides: bool) -> None:
        self._vocabulary, self._hides = vocabulary, hides

    def data(self, token_id: int) -> bytes | None:
        """Its bytes; None for one without text."""
        if self._vocabulary is None:
            return None
        try:
            return self._vocabulary.bytes_of_token(token_id)
        except ModelError:  # a column of the logits behind the tokenizer's vocabulary
            return None

    def text(self, token_id: int, prefix: str = "") -> str:
        """Its text; a part of a character as its bytes in hexadecimal, behind `prefix`; else its id."""
        data = self.data(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token."""
        return self._vocabulary is not None and self._vocabulary.is_special(token_id)

    def shown(self, token_id: int) -> list[int]:
        """The bytes that it adds to the text, before any stop is cut off: none where it is hidden."""
        if self._hides and self.is_special(token_id):
            return []
        return list(self.data(token_id) or b"")


class Legacy:
    """The four lists of /v1/completions, for one choice, as its tokens come.

    text_offset: how many characters of prompt and output, as echo shows them, stand before the token, whether echo is
    asked for or not; a token inside a character has the offset of that character. Where a stop string is cut off,
    offsets of its tokens go on as if it were there. tokens: texts; a part of a character is its bytes, "bytes:\\xe2".
    top: entries beside each token; the token has one of its own. Of two tokens with the same text the likelier counts,
    the token itself before all. Of the first token of a prompt nothing is said: None.

    Sources: OpenAI's API reference has the lists without a word on them. Recorded answers of its gpt-3.5-turbo-instruct
    begin the offsets at the length of the prompt, without echo (36 behind "What can you tell me about the car ?", in
    tests of LangStream), as do DeepSeek's and llama-cpp-python's; vLLM counts from the beginning of the text that it
    returns, which is the same with echo alone. None for the first token, and "bytes:" before parts of characters, are
    OpenAI's (lm-evaluation-harness and HELM read them so).
    """

    def __init__(
        self, texts: TokenTexts, vocabulary: TokenBytes | None, params: SamplingParams, prompt_ids: Sequence[int],
        top: int, *, echo: bool,
    ) -> None:  # fmt: skip
        self._texts, self._top, self._offset = texts, top, 0
        shows = params.but(stop=(), detokenize=True, echo=True)
        self._stream = None if vocabulary is None else TextStream(vocabulary, shows, prompt_ids)
        self._of_prompt: TextStream | None = None
        half = b""
        if vocabulary is not None and echo:
            self._of_prompt = TextStream(vocabulary, shows.but(echo=False))
        elif vocabulary is not None:
            spaces = params.spaces_between_special_tokens
            self._offset, half = _end_of(tuple(prompt_ids), vocabulary, params.skip_special_tokens, spaces)
        self._waits = Utf8Decoder(half)  # for the rest of a character

    def of_prompt(self, prompt_ids: Sequence[int], said: Logprobs) -> dict[str, list[Any]]:
        """The lists of the prompt's tokens, which come first with echo; nothing is said of the first."""
        return self._lists(prompt_ids, said, self._of_prompt)

    def of_output(self, token_ids: Sequence[int], said: Logprobs) -> dict[str, list[Any]]:
        """The lists of new tokens."""
        return self._lists(token_ids, said, self._stream)

    def _lists(self, token_ids: Sequence[int], said: Logprobs, stream: TextStream | None) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, token_id in enumerate(token_ids):
            known = bool(said.rank[i] > 0)
            lists["tokens"].append(self._texts.text(token_id, "bytes:"))
            lists["token_logprobs"].append(number(float(said.sampled[i])) if known else None)
            lists["top_logprobs"].append(self._most_likely(token_id, said, i) if known else None)
            lists["text_offset"].append(self._offset + self._breaks(token_id))
            if stream is not None:
                stream.push(token_id)
                self._offset += len(stream.delta())
        return lists

    def _breaks(self, token_id: int) -> bool:
        """Whether a token ends, as U+FFFD, a character that had begun before it. Takes its bytes."""
        special, data = self._texts.is_special(token_id), self._texts.data(token_id) or b""
        begun = self._waits.pending
        breaks = bool(begun) and (special or (bool(data) and not continues(begun, data)))
        if special:
            self._waits = Utf8Decoder()
        else:
            self._waits.push(data)
        return breaks

    def _most_likely(self, token_id: int, said: Logprobs, i: int) -> dict[str, float]:
        entries = {self._texts.text(token_id, "bytes:"): number(float(said.sampled[i]))}
        for other, value in pairs(*said.top_of(i), self._top):
            entries.setdefault(self._texts.text(other, "bytes:"), value)
        return dict(sorted(entries.items(), key=lambda entry: -entry[1]))


@lru_cache(maxsize=8)  # the choices of one prompt ask the same
def _end_of(ids: tuple[int, ...], vocabulary: TokenBytes, hides: bool, spaces: bool) -> tuple[int, bytes]:
    """How many characters a prompt has as echo shows it, and the bytes of the one that it does not finish.

    Ids without text, which only echo refuses, have none.
    """
    texts = TokenTexts(vocabulary, hides)
    known = [token_id for token_id in ids if texts.data(token_id) is not None]
    shows = SamplingParams(skip_special_tokens=hides, spaces_between_special_tokens=spaces)
    tail = b""
    for token_id in reversed(known):
        if texts.is_special(token_id) or len(tail) > 3:
            break
        tail = (texts.data(token_id) or b"") + tail
    return len(text_of_prompt(vocabulary, shows, known)), pending_of_bytes(tail)


def chat_logprobs(texts: TokenTexts, token_ids: Sequence[int], said: Logprobs, top: int) -> dict[str, Any]:
    """The object of /v1/chat/completions: for each token its text, logprob and bytes, and of the `top` likeliest."""
    content = []
    for i, token_id in enumerate(token_ids):
        if not said.rank[i] > 0:
            continue  # its choice ends in an error, which is all that is told
        likely = [_entry(texts, other, value) for other, value in pairs(*said.top_of(i), top)]
        content.append({**_entry(texts, token_id, number(float(said.sampled[i]))), "top_logprobs": likely})
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.shown(token_id)}


def pairs(ids: Any, values: Any, most: int) -> Iterable[tuple[int, float]]:
    """Ids and logprobs of the first `most`, -1: of all; none where their row could not be scored."""
    end = None if most == EVERY_TOKEN else most
    for token_id, value in zip(ids[:end].tolist(), values[:end].tolist(), strict=True):
        if token_id >= 0 and value == value:
            yield token_id, number(value)


def receipts(said: Logprobs, top: int) -> list[dict[str, Any] | None]:
    """An object for each token, of what was asked for; None where nothing is said. top: entries of the list."""
    return [_receipt(said, i, top) for i in range(len(said))]


def _receipt(said: Logprobs, i: int, top: int) -> dict[str, Any] | None:
    out: dict[str, Any] = {}
    if said.rank[i] > 0:
        out = {"token_id": int(said.token_ids[i]), "logprob": number(float(said.sampled[i])), "rank": int(said.rank[i])}
    if not math.isnan(said.processed[i]):
        out |= {name: number(float(getattr(said, name)[i])) for name in ("raw", "processed", "kept_mass")}
    if said.num_kept[i] > 0:
        out["num_kept"] = int(said.num_kept[i])
    for name, listed in (("top", pairs(*said.top_of(i), top)), ("listed", pairs(*said.listed_of(i), EVERY_TOKEN))):
        if entries := [list(entry) for entry in listed]:
            out[name] = entries
    ids, probs = said.kept_of(i)
    if len(ids):
        out["kept_ids"] = ids.tolist()
        if len(probs) and not math.isnan(probs[0]):  # else the ids alone were asked for
            out["kept_probs"] = probs.tolist()
    return out or None
