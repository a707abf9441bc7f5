"""LLM: prompts in, texts out, on one model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from klero.engine.engine import Engine
from klero.engine.outputs import Progress, RequestOutput
from klero.errors import Fault, OptionError, ParameterError, RequestError
from klero.finish import TokenBytes
from klero.params import SamplingParams
from klero.sampling.stateless import warm_up

Prompt = str | Sequence[int]


class LLM:
    """A model with everything around it.

    model: "smollm2" (the default model), a folder, a GGUF file, a hub id, a live `nn.Module` (weights shared, not
    copied), or any object with the methods of `klero.engine.models.protocol.Model`. dtype: "auto", "float32",
    "bfloat16", "float16". tokenizer: for a live module or a Model that has none; a fast tokenizer of transformers.
    max_num_seqs: sequences at a time. max_num_batched_tokens: tokens a step computes; longer prompts come in chunks.
    block_size, num_blocks: the paged KV cache; None: up to 4 GiB. seed: makes the seeds of requests that bring none.
    max_model_len: a context shorter than the model's own.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        *,
        dtype: str = "auto",
        tokenizer: Any = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        seed: int | None = None,
    ) -> None:
        if hasattr(model, "forward") and hasattr(model, "bytes_per_block"):
            if dtype != "auto":
                raise OptionError(f"dtype={dtype!r}: a Model object has its own dtype; leave it at 'auto'")
            loaded, own_tokenizer = model, getattr(model, "tokenizer", None)
        else:
            from klero.engine.models.load import load_model

            loaded, own_tokenizer = load_model(model, dtype=dtype)
        self.tokenizer = tokenizer if tokenizer is not None else own_tokenizer
        vocabulary = getattr(loaded, "vocabulary", None)
        if self.tokenizer is not None:
            vocabulary = TokenBytes(self.tokenizer)
        self.engine = Engine(
            loaded,
            vocabulary=vocabulary,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            seed=seed,
            max_model_len=max_model_len,
        )
        self._ids = itertools.count()
        self._lock, self._busy = threading.Lock(), 0  # one generate at a time: it takes every output of a step
        warm_up(np.float32)
        if "bfloat16" in str(getattr(getattr(loaded, "module", None), "dtype", "")):
            warm_up(np.uint16)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, in one batch; results come in the order of the prompts.

        prompts: a string, a list of token ids, or a list of either. params: one for all, or one per prompt; None is
        greedy. One params object with a seed over several prompts: prompt i uses seed + i (mod 2^64), and reports it,
        because the same seed on prompts of equal length would share every lot. progress: called after every step. Every
        prompt is checked before any runs: RequestError or ParameterError names the one at fault.
        """
        listed = _listed(prompts)
        names = [f"request-{next(self._ids)}" for _ in listed]
        if self._busy == threading.get_ident():
            raise RequestError("generate was called from its own progress callback; wait until it has returned")
        with self._lock:
            self._busy = threading.get_ident()
            try:
                if self.engine.num_unfinished:
                    raise RequestError("the engine runs requests added to it directly; step it until they end")
                self._add(names, listed, _params_of(params, len(listed)))
                return self._run(names, progress)
            except BaseException:
                self.engine.discard(names)
                raise
            finally:
                self._busy = 0

    def _add(self, names: list[str], prompts: list[Prompt], params: list[SamplingParams]) -> None:
        for i, (name, prompt, one) in enumerate(zip(names, prompts, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            try:
                self.engine.add_request(name, self._encode(prompt), one, prompt=text)
            except RequestError as error:
                raise RequestError(f"prompts[{i}]: {error}") from None
            except ParameterError as error:
                named = [Fault(fault.field, fault.value, f"{fault.rule} (prompts[{i}])") for fault in error.faults]
                raise ParameterError(named) from None

    def _run(self, names: list[str], progress: Callable[[Progress], None] | None) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        before, mine = self.engine.num_generated, set(names)
        while len(outputs) < len(names):
            # outputs of requests that the caller added to the engine himself are not for this call
            outputs |= {output.request_id: output for output in self.engine.step() if output.request_id in mine}
            if progress is not None:
                progress(Progress(len(outputs), len(names), self.engine.num_generated - before))
        return [outputs[name] for name in names]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return _ids(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestError("the prompt holds half a surrogate pair, which no tokenizer can read") from None
        if self.tokenizer is None:
            raise RequestError("a prompt in text needs a tokenizer; pass token ids, or LLM(tokenizer=...)")
        return list(self.tokenizer.encode(prompt))


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = [item if isinstance(item, str) else _plain(item) for item in _ids(prompts)]
    if listed and not any(isinstance(item, str | list) for item in listed):
        return [listed]
    return listed


def _plain(item: Any) -> Any:
    """Arrays and tensors as lists and numbers; tuples as lists."""
    item = item.tolist() if hasattr(item, "tolist") else item
    return list(item) if isinstance(item, tuple | range) else item


def _ids(prompt: Any) -> list[Any]:
    """The entries of a list, a tuple or an array."""
    prompt = _plain(prompt)
    if not isinstance(prompt, list):
        raise RequestError(f"prompt {prompt!r}: must be a text or a list of token ids")
    return prompt


def _params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The parameters of each prompt; a seed given once is spread over the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params.for_prompt(i) for i in range(num_prompts)]
    if isinstance(params, dict) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("params: must be SamplingParams or a list of them; SamplingParams.from_dict reads a dict")
    if len(params) != num_prompts:
        raise RequestError(f"params: {len(params)} for {num_prompts} prompts; give one for all, or one for each")
    return list(params)
