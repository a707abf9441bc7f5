"""The part of llama_cpp's C API that klero calls, over the logits of klero's toy models.

As strict as the real one where a mistake of the caller would show: positions must follow on, sequence numbers and
batch sizes have limits, a pool of cells runs out, rows come for flagged tokens only, a view of logits dies with the
next decode, and what was freed is never used again.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import types
from typing import Any

import numpy as np

from klero.testing.models import logits_of_state, state_after

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TEMPLATE += "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}"
TEMPLATE += "{% if add_generation_prompt %}a:{% endif %}"


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max_per_seq")),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("kv_unified", ctypes.c_bool),
    )


class FakeLlamaCpp(types.ModuleType):
    """Stands for the module. Its files hold b"GGUF" and, if they like, JSON: pieces, control, eog, add_bos, ..."""

    __version__ = "0.0-fake"
    llama_token = ctypes.c_int32
    llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

    def __init__(self, *, max_cells: int = 10**6, max_seqs: int = 256) -> None:
        super().__init__("llama_cpp")
        self.max_cells, self.max_seqs = max_cells, max_seqs
        self.models: dict[int, dict[str, Any]] = {}
        self.contexts: dict[int, dict[str, Any]] = {}
        self.batches: dict[int, Any] = {}
        self.decoded: list[int] = []  # tokens of each decode that ran
        self.fail_with: int | None = None  # the code of the next decode
        self._handles = itertools.count(1000)
        self._log: Any = None

    def _complain(self, text: str) -> None:
        if self._log is not None:
            self._log(4, text.encode(), None)

    def llama_backend_init(self) -> None: ...

    def llama_log_set(self, callback: Any, data: Any) -> None:
        self._log = callback

    def llama_max_parallel_sequences(self) -> int:
        return self.max_seqs

    # the model and its vocabulary

    def llama_model_default_params(self) -> object:
        return object()

    def llama_model_load_from_file(self, path: bytes, params: object) -> int | None:
        with open(path, "rb") as file:
            data = file.read()
        if not data.startswith(b"GGUF"):
            self._complain("invalid magic")
            return None
        about = {"pieces": [chr(33 + i) for i in range(64)], "control": [0, 1], "eog": [0], "add_bos": False, "bos": 1}
        about |= {"n_ctx_train": 256, "encoder": False, "template": TEMPLATE, "meta": {}}
        self.models[handle := next(self._handles)] = about | json.loads(data[4:] or b"{}")
        return handle

    def llama_model_free(self, model: int) -> None:
        assert not any(context["model"] == model for context in self.contexts.values()), "a context outlives its model"
        del self.models[model]

    def llama_model_get_vocab(self, model: int) -> int:
        return model

    def llama_vocab_n_tokens(self, vocab: int) -> int:
        return len(self.models[vocab]["pieces"])

    def llama_model_n_ctx_train(self, model: int) -> int:
        return self.models[model]["n_ctx_train"]

    def llama_model_has_encoder(self, model: int) -> bool:
        return self.models[model]["encoder"]

    def llama_model_has_decoder(self, model: int) -> bool:
        return True

    def llama_model_meta_val_str(self, model: int, key: bytes, buffer: Any, size: int) -> int:
        value = ({"general.architecture": "toy"} | self.models[model]["meta"]).get(key.decode())
        if value is None:
            return -1
        buffer.value = value.encode()
        return len(value)

    def llama_model_chat_template(self, model: int, name: bytes | None) -> bytes | None:
        template = self.models[model]["template"]
        return None if template is None else template.encode()

    def llama_vocab_is_control(self, vocab: int, token: int) -> bool:
        return token in self.models[vocab]["control"]

    def llama_vocab_is_eog(self, vocab: int, token: int) -> bool:
        return token in self.models[vocab]["eog"]

    def llama_vocab_bos(self, vocab: int) -> int:
        return self.models[vocab]["bos"]

    def llama_vocab_eos(self, vocab: int) -> int:
        return (self.models[vocab]["eog"] or [-1])[0]

    def llama_token_to_piece(self, vocab: int, token: int, buffer: Any, size: int, lstrip: int, special: bool) -> int:
        piece = self.models[vocab]["pieces"][token].encode()
        if not special and self.llama_vocab_is_control(vocab, token):
            piece = b""
        if len(piece) > size:
            return -len(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def llama_tokenize(
        self, vocab: int, text: bytes, size: int, ids: Any, room: int, add_special: bool, parse_special: bool
    ) -> int:
        about = self.models[vocab]
        pieces = [(piece.encode(), i) for i, piece in enumerate(about["pieces"])]
        found = [about["bos"]] if add_special and about["add_bos"] else []
        at = 0
        while at < size:
            fits = [(len(p), i) for p, i in pieces if p and text.startswith(p, at)]
            fits = [(n, i) for n, i in fits if parse_special or i not in about["control"]]
            assert fits, f"no piece for {text[at:]!r}"
            length, token = max(fits)
            found.append(token)
            at += length
        if len(found) > room:
            return -len(found)
        ids[: len(found)] = found
        return len(found)

    # contexts

    def llama_context_default_params(self) -> ContextParams:
        return ContextParams(n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, n_outputs_max_per_seq=1, n_threads=4)

    def llama_init_from_model(self, model: int, params: ContextParams) -> int | None:
        assert model in self.models
        if params.n_ctx > self.max_cells or params.n_seq_max > self.max_seqs:
            self._complain("failed to allocate buffer for kv cache")
            return None
        names = [name for name, _ in params._fields_]
        context = {name: getattr(params, name) for name in names} | {"model": model, "held": {}, "rows": None}
        self.contexts[handle := next(self._handles)] = context
        return handle

    def llama_free(self, context: int) -> None:
        del self.contexts[context]

    def llama_n_ctx(self, context: int) -> int:
        return self.contexts[context]["n_ctx"]

    def llama_get_memory(self, context: int) -> int:
        return context

    def llama_set_n_threads(self, context: int, threads: int, threads_batch: int) -> None:
        self.contexts[context] |= {"n_threads": threads, "n_threads_batch": threads_batch}

    def llama_memory_seq_rm(self, memory: int, seq: int, begin: int, end: int) -> bool:
        context = self.contexts[memory]
        assert 0 <= seq < context["n_seq_max"], "llama.cpp aborts the process here"
        assert (begin, end) == (-1, -1)
        context["held"].pop(seq, None)
        return True

    def llama_state_seq_get_size(self, context: int, seq: int) -> int:
        return len(json.dumps(self.contexts[context]["held"].get(seq)))

    def llama_state_seq_get_data(self, context: int, data: Any, size: int, seq: int) -> int:
        state = json.dumps(self.contexts[context]["held"].get(seq)).encode()
        data[: len(state)] = list(state)
        return len(state)

    def llama_state_seq_set_data(self, context: int, data: Any, size: int, seq: int) -> int:
        assert seq < self.contexts[context]["n_seq_max"]
        held = json.loads(bytes(data[:size]))
        if held is not None:
            self.contexts[context]["held"][seq] = held
        return size

    def llama_batch_init(self, num_tokens: int, embd: int, num_seqs: int) -> Batch:
        assert (embd, num_seqs) == (0, 1)
        seqs = [(ctypes.c_int32 * 1)(-1) for _ in range(num_tokens)]
        arrays = [(ctypes.c_int32 * num_tokens)(*[-1] * num_tokens) for _ in range(3)]
        logits = (ctypes.c_int8 * num_tokens)(*[1] * num_tokens)  # not initialised: poisoned
        pointer = ctypes.POINTER(ctypes.c_int32)
        pointers = (pointer * num_tokens)(*[ctypes.cast(seq, pointer) for seq in seqs])
        batch = Batch()
        batch.token, batch.pos, batch.n_seq_id = (ctypes.cast(a, pointer) for a in arrays)
        batch.seq_id = ctypes.cast(pointers, ctypes.POINTER(pointer))
        batch.logits = ctypes.cast(logits, ctypes.POINTER(ctypes.c_int8))
        self.batches[ctypes.addressof(arrays[0])] = (seqs, arrays, logits, pointers, num_tokens)
        return batch

    def llama_batch_free(self, batch: Batch) -> None:
        del self.batches[ctypes.addressof(batch.token.contents)]

    def llama_decode(self, handle: int, batch: Batch) -> int:
        context, num = self.contexts[handle], batch.n_tokens
        capacity = self.batches[ctypes.addressof(batch.token.contents)][4]
        assert 0 < num <= capacity, "written past the batch's end"
        if self.fail_with is not None:
            code, self.fail_with = self.fail_with, None
            self._complain("told to fail")
            return code
        tokens = [(batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i]) for i in range(num)]
        held = {seq: list(state) for seq, state in context["held"].items()}  # (tokens, state), put back on failure
        num_rows: dict[int, int] = {}
        rows = []
        for i, (token, position, seq, wanted) in enumerate(tokens):
            about = self.models[context["model"]]
            count, state = held.get(seq, (0, 0))
            num_rows[seq] = num_rows.get(seq, 0) + wanted
            sound = 0 <= token < len(about["pieces"]) and 0 <= seq < context["n_seq_max"] and batch.n_seq_id[i] == 1
            sound = sound and num_rows[seq] <= (context["n_outputs_max_per_seq"] or num)
            if not sound or position != count or num > context["n_batch"]:
                self._complain(f"token {token} at {position} of sequence {seq}")
                return -1
            held[seq] = [count + 1, state := state_after(state, token, count)]
            if wanted:
                rows.append(logits_of_state(state, len(about["pieces"]), 4.0))
        if sum(count for count, _ in held.values()) > context["n_ctx"]:
            return 1
        if context["rows"] is not None:
            context["rows"][:] = np.nan
        context |= {"held": held, "rows": np.stack(rows) if rows else None}
        self.decoded.append(num)
        return 0

    def llama_get_logits(self, context: int) -> Any:
        rows = self.contexts[context]["rows"]
        return None if rows is None else rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
