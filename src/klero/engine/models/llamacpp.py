"""llama.cpp as a model: the forward is its own, batching and sampling are klero's.

A `Model` that owns its sequences: a slot is a llama.cpp sequence, and its keys and values lie in llama.cpp's memory.
All sequences share one pool of cells, one cell a token. The pool starts small and doubles when a step finds no room, so
that nobody pays for `max_num_seqs` full contexts; what a sequence holds is copied into the larger pool. Every function
of llama.cpp is reached through the C API of the package llama-cpp-python (extra `llamacpp`).
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from klero.device import num_threads
from klero.engine.models import smollm2
from klero.errors import MissingExtra, ModelError
from klero.finish import TokenBytes

if TYPE_CHECKING:
    from klero.batch import StepArrays

PREFIX = "llama.cpp:"
NO_ROOM = 1  # what llama_decode returns when the pool has no cells for a batch, which then changed nothing
NEEDED = ("llama_memory_seq_rm", "llama_vocab_is_eog", "llama_state_seq_set_data", "llama_set_n_threads")
ERROR_LEVEL = 4

_log = logging.getLogger("klero.llamacpp")
_errors: collections.deque[str] = collections.deque(maxlen=3)  # the last that llama.cpp complained of


def load(name: str, *, dtype: str, max_model_len: int | None, deterministic: bool | None) -> tuple[LlamaCppModel, Any]:
    """Return model and tokenizer of "llama.cpp:FILE.gguf" or "llama.cpp:smollm2".

    ModelError for a dtype other than "auto" (the file's quantisation decides) and for deterministic=True.
    """
    if dtype != "auto":
        raise ModelError(f"dtype={dtype!r}: llama.cpp computes in what the GGUF file holds; leave dtype at 'auto'")
    if deterministic:
        raise ModelError(
            "deterministic=True: llama.cpp's logits change with the batch; leave it out, or load the same file "
            "without the prefix 'llama.cpp:'"
        )
    file = name.removeprefix(PREFIX)
    path = smollm2.find_gguf() if file == smollm2.NAME else Path(file).expanduser()
    model = LlamaCppModel(path, max_model_len=max_model_len)
    return model, model.tokenizer


class LlamaCppModel:
    """A GGUF file run by llama.cpp.

    path: a decoder-only model. max_model_len: a context shorter than the file's own, in tokens. threads: of
    llama.cpp; None: what `klero.device.num_threads` says at each step. num_tokens: tokens that the pool holds at
    first. batch_size: tokens of one llama_decode; a longer step takes several. MissingExtra without the package;
    ModelError for a file that is missing, that llama.cpp cannot read, or that is no decoder.
    """

    uses_blocks = False
    deterministic = False  # its matrix products and attention change with the batch

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_model_len: int | None = None,
        threads: int | None = None,
        num_tokens: int = 2048,
        batch_size: int = 512,
    ) -> None:
        for option, value in (("threads", threads), ("num_tokens", num_tokens), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ModelError(f"{option}={value}: must be at least 1")
        weights = _Weights(Path(path))
        self._lib, self._threads, self._batch_size = weights.lib, threads, batch_size
        self.path, self.vocab_size = weights.path, weights.vocab_size
        self.max_model_len = _context_length(weights, max_model_len)
        self.tokenizer = LlamaCppTokenizer(weights)
        self.vocabulary, self.end_token_ids = _vocabulary(weights)
        self._held: set[int] = set()  # slots that have tokens in the pool
        self._context = _Context(weights, max(num_tokens, weights.least_pool), 8, batch_size, self.threads)
        self._batch = self._lib.llama_batch_init(batch_size, 0, 1)
        weakref.finalize(self, self._lib.llama_batch_free, self._batch)

    def __repr__(self) -> str:
        return f"LlamaCppModel({str(self.path)!r}, threads={self.threads})"

    @property
    def threads(self) -> int:
        """Threads of llama.cpp at the next step."""
        return num_threads() if self._threads is None else self._threads

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Nothing to make room for: the pool is llama.cpp's."""

    def bytes_per_block(self, block_size: int) -> int:
        """No blocks."""
        return 0

    def release(self, slot: int) -> None:
        """Free the cells of a sequence."""
        if slot in self._held:
            self._held.discard(slot)
            self._lib.llama_memory_seq_rm(self._context.memory, slot, -1, -1)

    def forward(self, step: StepArrays) -> npt.NDArray[np.float32]:
        """Return the logits [R, V] of `step.logits_rows`, a copy. ModelError when llama.cpp cannot compute the step."""
        self._seat(step.slots)
        self._context.use(self.threads)
        slots = np.repeat(step.slots, np.diff(step.query_starts))
        wanted = np.zeros(len(slots), np.int8)
        wanted[step.logits_rows] = 1
        row_after = np.cumsum(wanted, dtype=np.int64)  # rows up to and with each token
        rows = np.empty((int(wanted.sum()), self.vocab_size), np.float32)
        for first in range(0, len(slots), self._batch_size):
            part = slice(first, min(first + self._batch_size, len(slots)))
            self._decode(step.input_ids[part], step.positions[part], slots[part], wanted[part])
            begin, end = row_after[first] - wanted[first], row_after[part.stop - 1]
            if end > begin:
                rows[begin:end] = self._context.logits(int(end - begin), self.vocab_size)
        asked = row_after[step.logits_rows] - 1
        return rows if np.array_equal(asked, np.arange(len(rows))) else rows[asked]

    def _decode(self, ids: Any, positions: Any, slots: Any, wanted: Any) -> None:
        """Run one batch; a pool without room for it grows first."""
        batch, num = self._batch, len(ids)
        batch.n_tokens = num
        for target, values in ((batch.token, ids), (batch.pos, positions), (batch.logits, wanted)):
            np.ctypeslib.as_array(target, (num,))[:] = values
        np.ctypeslib.as_array(batch.n_seq_id, (num,))[:] = 1
        for place, slot in zip(range(num), slots.tolist(), strict=True):
            batch.seq_id[place][0] = slot
        _errors.clear()
        code = self._lib.llama_decode(self._context.pointer, batch)
        while code == NO_ROOM and self._context.num_tokens < self._context.num_seqs * self.max_model_len:
            self._grow(2 * self._context.num_tokens, self._context.num_seqs)
            code = self._lib.llama_decode(self._context.pointer, batch)
        if code == NO_ROOM:
            raise ModelError(f"llama.cpp finds no room for a step of {num} tokens in {self._context}{_complaint()}")
        if code != 0:
            raise ModelError(f"llama_decode failed with code {code} on a step of {num} tokens{_complaint()}")

    def _seat(self, slots: Any) -> None:
        """Make sure that llama.cpp knows sequences of these numbers."""
        needed, most = int(slots.max(initial=0)) + 1, self._lib.llama_max_parallel_sequences()
        if needed > most:
            raise ModelError(f"max_num_seqs: llama.cpp runs {most} sequences at a time, and this step has {needed}")
        if needed > self._context.num_seqs:
            self._grow(self._context.num_tokens, min(most, 1 << (needed - 1).bit_length()))
        self._held.update(slots.tolist())

    def _grow(self, num_tokens: int, num_seqs: int) -> None:
        """Move every sequence into a larger context. The old one stays until the new one is complete."""
        old = self._context
        new = _Context(old.weights, num_tokens, num_seqs, self._batch_size, self.threads)
        for slot in self._held:
            old.copy(slot, new)
        self._context = new
        old.close()


class LlamaCppTokenizer:
    """The tokenizer that a GGUF file carries. chat_template: its Jinja text, or None."""

    def __init__(self, weights: _Weights) -> None:
        self._weights = weights
        template = weights.lib.llama_model_chat_template(weights.pointer, None)
        self.chat_template = None if template is None else template.decode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the bos that the model asks for; special tokens in it are recognised."""
        data, lib = text.encode(), self._weights.lib
        room = len(data) + 8
        while True:
            ids = (lib.llama_token * room)()
            num = lib.llama_tokenize(self._weights.vocab, data, len(data), ids, room, add_special_tokens, True)
            if num >= 0:
                return list(ids[:num])
            room = -num

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template that is given, or the file's own. ModelError if there is neither."""
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ModelError(f"{self._weights.path}: the file has no chat template; pass one, or lay out the prompt")
        return template

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the ids of a conversation (`{"role": ..., "content": ...}`), or its text with tokenize=False.

        The arguments are those of transformers; variables go to the template. ModelError for a file without a template,
        or one that refuses the conversation.
        """
        text = _render(
            self.get_chat_template(chat_template),
            messages=conversation,
            add_generation_prompt=add_generation_prompt,
            **self._weights.named_tokens(),
            **variables,
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids} if return_dict else ids


def _render(template: str, **variables: Any) -> str:
    """Fill in a chat template, in a sandbox: it comes from a file that anybody may have written."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(template).render(raise_exception=refuse, **variables)
    except TemplateError as error:
        raise ModelError(f"the chat template refuses this conversation: {error}") from error


class _Weights:
    """A GGUF file in memory, and its vocabulary; freed with the last that uses it."""

    def __init__(self, path: Path) -> None:
        self.lib, self.path = library(), path
        if not path.is_file():
            raise ModelError(f"{PREFIX}{path}: no such file; name a GGUF file, or {PREFIX}{smollm2.NAME}")
        _errors.clear()
        self.pointer = self.lib.llama_model_load_from_file(os.fsencode(path), self.lib.llama_model_default_params())
        if not self.pointer:
            raise ModelError(f"{path}: llama.cpp cannot read this file{_complaint()}")
        weakref.finalize(self, self.lib.llama_model_free, self.pointer)
        if self.lib.llama_model_has_encoder(self.pointer) or not self.lib.llama_model_has_decoder(self.pointer):
            raise ModelError(f"{path}: has an encoder or no decoder; klero runs decoder-only models")
        self.vocab = self.lib.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = self.lib.llama_vocab_n_tokens(self.vocab)
        self.context_length: int = self.lib.llama_model_n_ctx_train(self.pointer)
        kind = self._metadata("general.architecture")
        original = int(self._metadata(f"{kind}.rope.scaling.original_context_length") or 0)
        # a file may have rotary factors for short and for long contexts, and llama.cpp chooses by the size of the pool:
        # a pool that is above the border from the start never changes them
        self.least_pool = original + 256 if original else 1

    def _metadata(self, key: str) -> str:
        """The value of a key of the file as text; "" where it is absent."""
        buffer = ctypes.create_string_buffer(256)
        num = self.lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return "" if num < 0 else buffer.value.decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, special ones too."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            num = self.lib.llama_token_to_piece(self.vocab, token_id, buffer, size, 0, True)
            if num >= 0:
                return buffer.raw[:num]
            size = -num

    def named_tokens(self) -> dict[str, str]:
        """The texts of bos and eos, which chat templates ask for; "" where the vocabulary has none."""
        ids = {"bos_token": self.lib.llama_vocab_bos(self.vocab), "eos_token": self.lib.llama_vocab_eos(self.vocab)}
        return {name: self.piece(i).decode(errors="replace") if i >= 0 else "" for name, i in ids.items()}


class _Context:
    """A llama.cpp context: one pool of num_tokens cells for up to num_seqs sequences together."""

    def __init__(self, weights: _Weights, num_tokens: int, num_seqs: int, batch_size: int, threads: int) -> None:
        lib = weights.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_tokens, num_seqs
        params.n_batch = params.n_ubatch = batch_size
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        if hasattr(params, "n_outputs_max_per_seq"):
            params.n_outputs_max_per_seq = 0  # any token may be asked for its row
        _errors.clear()
        self.weights, self.num_tokens, self.num_seqs, self.threads = weights, num_tokens, num_seqs, threads
        self.pointer = lib.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise ModelError(
                f"llama.cpp cannot make {self}{_complaint()}; if memory is short, lower max_num_seqs or max_tokens"
            )
        # the callback holds the weights, so that they are freed after the context, whatever the collector begins with
        self.close = weakref.finalize(self, _free_context, weights, self.pointer)
        self.memory = lib.llama_get_memory(self.pointer)
        self.num_tokens = lib.llama_n_ctx(self.pointer)  # it rounds up

    def __str__(self) -> str:
        return f"a context of {self.num_tokens} tokens for {self.num_seqs} sequences"

    def use(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        if threads != self.threads:
            self.weights.lib.llama_set_n_threads(self.pointer, threads, threads)
            self.threads = threads

    def logits(self, num_rows: int, vocab_size: int) -> Any:
        """The rows of the last batch, in the order of its tokens: a view until the next."""
        pointer = self.weights.lib.llama_get_logits(self.pointer)
        if not pointer:
            raise ModelError(f"llama.cpp computed no logits for {num_rows} rows{_complaint()}")
        return np.ctypeslib.as_array(pointer, (num_rows, vocab_size))

    def copy(self, slot: int, target: _Context) -> None:
        """Copy the state of a sequence, bit for bit."""
        lib = self.weights.lib
        size = lib.llama_state_seq_get_size(self.pointer, slot)
        data = (ctypes.c_uint8 * size)()
        taken = lib.llama_state_seq_get_data(self.pointer, data, size, slot)
        if taken == 0 or lib.llama_state_seq_set_data(target.pointer, data, taken, slot) == 0:
            raise ModelError(f"llama.cpp cannot move a sequence of {size} bytes into {target}{_complaint()}")


def _free_context(weights: _Weights, pointer: Any) -> None:
    weights.lib.llama_free(pointer)


def _context_length(weights: _Weights, asked: int | None) -> int:
    """What was asked for, or all that the file says."""
    limit = weights.context_length
    if asked is not None and not 1 <= asked <= limit:
        raise ModelError(f"max_model_len={asked}: must be in [1, {limit}], the context length of {weights.path}")
    return limit if asked is None else asked


def _vocabulary(weights: _Weights) -> tuple[TokenBytes, tuple[int, ...]]:
    """The bytes of every token, and the ids that end a text."""
    lib, vocab, ids = weights.lib, weights.vocab, range(weights.vocab_size)
    pieces = [weights.piece(i) for i in ids]
    special = [i for i in ids if lib.llama_vocab_is_control(vocab, i)]
    return TokenBytes.from_list(pieces, special), tuple(i for i in ids if lib.llama_vocab_is_eog(vocab, i))


def library() -> Any:
    """Return the module llama_cpp, its messages sent to the logger "klero.llamacpp"; MissingExtra without it."""
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        raise MissingExtra("llamacpp", "llama-cpp-python") from error
    missing = [name for name in NEEDED if not hasattr(llama_cpp, name)]
    if missing or not hasattr(llama_cpp.llama_context_default_params(), "kv_unified"):
        raise ModelError(
            f"llama-cpp-python {llama_cpp.__version__} is too old for klero; from a clone: "
            "pip install -U -c constraints.txt '.[llamacpp]'"
        )
    if _listen not in _keep:
        llama_cpp.llama_backend_init()
        _keep[_listen] = llama_cpp.llama_log_callback(_listen)
        llama_cpp.llama_log_set(_keep[_listen], ctypes.c_void_p(0))
    return llama_cpp


_keep: dict[Any, Any] = {}  # llama.cpp holds the callback's address only


def _listen(level: int, text: bytes, _: Any) -> None:
    """Keep llama.cpp's messages off the terminal, and its errors for ours."""
    message = text.decode(errors="replace").strip()
    if level == ERROR_LEVEL and message:
        _errors.append(message)
    _log.debug("%s", message)


def _complaint() -> str:
    """What llama.cpp complained of last, in parentheses."""
    return f" ({'; '.join(_errors)})" if _errors else ""
