"""LLM: prompts in, texts out, on one model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from klero.engine import chat as chats
from klero.engine.engine import Engine
from klero.engine.marks import marks_of
from klero.engine.options import options_of
from klero.engine.outputs import Delta, Progress, RequestOutput
from klero.engine.prompts import Prompt, ids_of, listed, names_of, naming, params_of, parts_of, priorities_of
from klero.engine.threads import Watch, set_spin, set_threads
from klero.engine.turns import Turns
from klero.engine.words import bad_word_ids, padded_from
from klero.errors import OptionError, RequestError
from klero.finish import TokenBytes
from klero.params import SamplingParams
from klero.sampling.stateless import warm_up


class LLM:
    """A model with everything around it.

    model: "smollm2" (the default model), a folder, a GGUF file, a hub id, "llama.cpp:FILE.gguf" (llama.cpp computes the
    forward), a live `nn.Module` (weights shared, not copied), or any object with the methods of
    `klero.engine.models.protocol.Model`. dtype: "auto", "float32", "bfloat16", "float16". tokenizer: for a live module
    or a Model that has none; a fast tokenizer of transformers.
    max_model_len: a context shorter than the model's own. seed: makes the seeds of requests that bring none.
    thinking_token_ids: (start, end), where the model's thinking begins and ends, each an id, a list of ids or a text;
    None: what the chat template uses, if klero knows it.
    deterministic: True: a request's tokens do not depend on what else runs; False: they may (a seed still draws the
    same lots, but the logits may differ); None: the model's default; a Model object has its own way. Every answer says
    which it was (`reproducible`). threads: of the forward and of klero's kernels, for the whole process; None: as the
    environment says. spin: bounds the rounds that OpenMP's threads spin while they wait, set before torch is loaded;
    None: as the environment says, with a warning where that ruins the steps. options: the fields of
    `klero.engine.EngineOptions`: batch sizes, blocks, prefix caching, swap space, microbatches, scheduling policy.

    Kernels are compiled here, or loaded from the cache; those for logprobs only once a request asks for them, while its
    step waits, and a terminal is told so. `klero warmup` compiles all of them ahead.

    Calls take turns: one `generate`, `chat` or `stream` has the engine at a time; another thread waits for its turn,
    and the same thread, from a progress callback or inside its own stream, gets a RequestError. `AsyncLLM` runs the
    requests of all callers in one batch. `close`, or the end of a with block, frees the model and its cache.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        dtype: str = "auto",
        tokenizer: Any = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        thinking_token_ids: Any = None,
        deterministic: bool | None = None,
        threads: int | None = None,
        spin: int | None = None,
        **options: Any,
    ) -> None:
        options_of(**options, max_model_len=max_model_len)  # what is wrong is told before a model is loaded
        set_spin(spin)
        set_threads(threads)
        self._watch = Watch()
        loaded, own_tokenizer = _load(model, dtype, deterministic, max_model_len)
        self._tokenizer_lock = threading.Lock()
        set_threads(threads)  # torch may have come with the model
        self.tokenizer = tokenizer if tokenizer is not None else own_tokenizer
        vocabulary = getattr(loaded, "vocabulary", None)
        if tokenizer is not None or (vocabulary is None and self.tokenizer is not None):
            vocabulary = TokenBytes(self.tokenizer)
        self.engine = Engine(
            loaded, vocabulary=vocabulary, encode=None if self.tokenizer is None else self._encode_word,
            padded_from=padded_from(self.tokenizer, loaded.vocab_size), max_model_len=max_model_len, seed=seed,
            marks=marks_of(thinking_token_ids, self.tokenizer, self._encode_word), **options,
        )  # fmt: skip
        self._ids = itertools.count()
        self._turns = Turns(self.engine)
        warm_up(np.float32, rewriting=True)
        if self.engine.dtype == "bfloat16":
            warm_up(np.uint16, rewriting=True)
        self._watch.look()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, in one batch; results come in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt_embeds": float32 [E, H], "prompt_token_ids": the ids behind},
        or a list of these. params: one for all, or one per prompt; None is greedy. One params object with a seed over
        several prompts: prompt i uses seed + i (mod 2^64), and reports it, because the same seed on prompts of equal
        length would share every lot. request_ids: a name for each, for `abort`. priority: one for all or one for each,
        with scheduling_policy="priority". cache_salt: cached prefixes are shared with calls of the same salt alone.
        progress: called after every step. Every prompt is checked before any runs: RequestError or ParameterError names
        the one at fault.
        """
        outputs: dict[str, RequestOutput] = {}
        with self._turn(prompts, params, request_ids, priority, cache_salt) as names:
            before, mine = self.engine.num_generated, frozenset(names)
            while len(outputs) < len(names):
                outputs |= self._turns.step(mine)
                self._watch.look()
                if progress is not None:
                    unfinished = tuple(name for name in names if name not in outputs)
                    num_tokens = self.engine.num_generated - before
                    progress(Progress(len(outputs), len(names), num_tokens, unfinished))
        return [outputs[name] for name in names]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> Generator[Delta, None, list[RequestOutput]]:
        """Generate as `generate` does, and yield what each step brings each choice, as it comes.

        Together, the deltas of a choice are its text, tokens, logprobs and end; sums, prompt logprobs and rows of
        logits are in the generator's value alone. The first `next` checks and starts everything; the turn lasts until
        the iterator ends or is closed, and closing it (leaving a for loop over it does, unless somebody keeps it)
        ends its requests and frees what they hold at once. The generator's value, for `yield from`, is what generate
        returns.
        """
        outputs: dict[str, RequestOutput] = {}
        with self._turn(prompts, params, request_ids, priority, cache_salt, stream=True) as names:
            mine = frozenset(names)
            while len(outputs) < len(names):
                outputs |= self._turns.step(mine)
                self._watch.look()
                for delta in self.engine.take_deltas():
                    yield delta
                    self._turns.move_here()
        return [outputs[name] for name in names]

    def chat(
        self,
        messages: chats.Conversation | Sequence[chats.Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_ids: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them: `generate` on what `render` makes of it."""
        self._turns.check_usable()
        prompts = []
        for where, conversation in chats.conversations_of(messages).items():
            with naming(where), self._tokenizer_lock:
                ids = chats.render(
                    self.tokenizer, conversation, add_generation_prompt=add_generation_prompt, tools=tools,
                    chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
                )  # fmt: skip
            prompts.append(ids)
        return self.generate(
            prompts, params, request_ids=request_ids, priority=priority, cache_salt=cache_salt, progress=progress
        )

    def render(
        self,
        messages: chats.Conversation,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt of one conversation, as token ids: `stream(llm.render(messages))` streams the answer.

        messages: dicts with "role" and "content" (a string, or text parts, which are joined). chat_template: instead of
        the tokenizer's own. tools, chat_template_kwargs: go to the template; refused where it does not use them.
        add_generation_prompt: open the assistant's turn. RequestError for malformed messages, a missing tokenizer or
        template, and whatever the template raises.
        """
        conversation = chats.checked("messages", messages)
        with self._tokenizer_lock:
            return chats.render(
                self.tokenizer, conversation, add_generation_prompt=add_generation_prompt, tools=tools,
                chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
            )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """Ask, from any thread, that a request of the running call ends before the next step, with what it has by then.

        Its finish_reason is "abort"; if it ends by itself first, that end stands. RequestError if none of that name
        waits or runs.
        """
        self._turns.abort(request_id)

    def close(self) -> None:
        """Abort what runs and free the model and its cache; any thread may, and a second time does nothing.

        The calls that run return at once, with what their requests have by then; a step is not interrupted.
        """
        self._turns.close()

    def __enter__(self) -> LLM:
        self._turns.check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: for weights that were changed where the model cannot see it."""
        self._turns.reset_prefix_cache()

    def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt: a text by the tokenizer, ids as they are. RequestError if that fails."""
        if not isinstance(prompt, str):
            ids = ids_of(prompt)
            if ids and isinstance(ids[0], str | list):
                raise RequestError("several prompts where one belongs; ask for each by itself")
            return ids
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestError("the prompt holds half a surrogate pair, which no tokenizer can read") from None
        if self.tokenizer is None:
            raise RequestError("a prompt in text needs a tokenizer; pass token ids, or LLM(tokenizer=...)")
        with self._tokenizer_lock:  # fast tokenizers refuse to be used by two threads at once
            encoded = self.tokenizer.encode(prompt)
        return list(getattr(encoded, "ids", encoded))

    def words_as_ids(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that ban the same by bad_token_ids alone, so that the engine's thread tokenizes nothing.

        ParameterError where there is no tokenizer, or a word has no tokens.
        """
        if not params.bad_words:
            return params
        encode = None if self.tokenizer is None else self._encode_word
        ids = bad_word_ids(params.bad_words, encode, self.engine.limits.vocab_size)
        return params.but(bad_words=(), bad_token_ids=(*params.bad_token_ids, *ids))

    def _encode_word(self, word: str) -> Sequence[int]:
        with self._tokenizer_lock:
            encoded = self.tokenizer.encode(word, add_special_tokens=False)
        return getattr(encoded, "ids", encoded)

    def lend(self) -> Engine:
        """Give the engine to an AsyncLLM: calls here are refused until `take_back`. RequestError if one runs."""
        self._turns.lend()
        return self.engine

    def take_back(self) -> None:
        """Let calls run again."""
        self._turns.take_back()

    @contextmanager
    def _turn(
        self,
        prompts: Any,
        params: Any,
        request_ids: str | Sequence[str] | None,
        priority: int | Sequence[int],
        cache_salt: str | None,
        *,
        stream: bool = False,
    ) -> Iterator[list[str]]:
        """Have the engine for one call, whose requests are in it; their names, in the order of the prompts."""
        asked = listed(prompts)
        one_each = params_of(params, len(asked))
        fresh = [f"request-{next(self._ids)}" for _ in asked]
        names = fresh if request_ids is None else names_of(request_ids, len(asked))
        ranks = priorities_of(priority, len(asked))

        def add() -> None:
            compiled = [self.engine.guides.prepare(one) for one in one_each]  # in the background; they wait together
            for i, (name, prompt, one) in enumerate(zip(names, asked, one_each, strict=True)):
                with naming(f"prompts[{i}]"):
                    given, embeds = parts_of(prompt)
                    text, grammar = given if isinstance(given, str) else None, compiled[i]
                    if grammar is not None:
                        wait([grammar], self.engine.guides.grammars.timeout)
                    self.engine.add_request(
                        name, self.tokenize(given), one, prompt=text, prompt_index=i, stream=stream,
                        prompt_embeds=embeds, priority=ranks[i], cache_salt=cache_salt, compiled=grammar,
                    )  # fmt: skip

        with self._turns.turn(names, add):
            yield names


def _load(
    model: Any, dtype: str, deterministic: bool | None, max_model_len: int | None
) -> tuple[Any, Any]:
    """The model, loaded if it is not a Model already, and its tokenizer or None."""
    if deterministic is not None and not isinstance(deterministic, bool):
        raise OptionError(f"deterministic={deterministic!r}: must be True, False or None")
    if not (hasattr(model, "forward") and hasattr(model, "bytes_per_block")):
        from klero.engine.models.load import load_model

        return load_model(model, dtype=dtype, max_model_len=max_model_len, deterministic=deterministic)
    if dtype != "auto":
        raise OptionError(f"dtype={dtype!r}: a Model object has its own dtype; leave it at 'auto'")
    own = bool(getattr(model, "deterministic", False))
    if deterministic is not None and deterministic != own:
        raise OptionError(
            f"deterministic={deterministic}: a Model object has its own way, here {own}; leave it at None, or make the "
            "Model so"
        )
    return model, getattr(model, "tokenizer", None)
