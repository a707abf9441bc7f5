"""KleroLM: klero as a model of lm-evaluation-harness, by the name "klero"."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from klero.errors import MissingExtra, ModelError, OptionError, RequestError
from klero.evals.scoring import Pair, Scored, score_pairs, windows
from klero.params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtra("lm-eval", "lm-evaluation-harness") from error

if TYPE_CHECKING:
    from klero.engine import LLM, Progress

log = logging.getLogger(__name__)
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("klero")
class KleroLM(TemplateLM):
    """Answers the harness's three kinds of requests, each kind in one batch.

    pretrained: what `klero.LLM` takes, and options its options (seed is 0 where it is not given); or an LLM, without
    any. batch_size: sequences at a time; None and "auto": max_batch_size, or 64. device: "cpu" or None. max_gen_toks:
    at most so many tokens where a task does not say. prefix_token_id: what an empty context is taken for, and what a
    rolling text begins with; None: the tokenizer's bos, else its eos.

    A log-likelihood is the sum of the model's own logprobs, in binary64. With a deterministic model it does not depend
    on what else is asked. A context that is too long loses its beginning, with a warning.
    """

    def __init__(
        self,
        pretrained: Any = "smollm2",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device not in (None, "cpu"):
            raise OptionError(f"device={device!r}: klero computes on the CPU; pass 'cpu', or nothing")
        self.llm = _llm(pretrained, batch_size, max_batch_size, options)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise OptionError("pretrained: the model comes without a tokenizer; pass LLM(model, tokenizer=...)")
        self.max_gen_toks, self._prefix_token_id = max_gen_toks, prefix_token_id

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: the model's context, or what all KV blocks hold."""
        limits = self.llm.engine.limits
        return limits.max_model_len if limits.capacity is None else min(limits.max_model_len, limits.capacity)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's eos, else the model's first end id."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return int(eos if eos is not None else self.llm.engine.model.end_token_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is taken for."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The token ids of a text. add_special_tokens: None: as the tokenizer does, and never a second bos."""
        bos = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        if add_special_tokens is None:
            return list(self.llm.tokenize(string))
        encoded = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return list(getattr(encoded, "ids", encoded))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model is given."""
        text = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return str(text)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation: its log-likelihood, and whether a greedy request would take it."""
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        return [(one.total, bool(one.is_greedy)) for one in self._score(pairs, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each text the log-likelihood after the prefix token; one too long is cut into windows."""
        cut = []
        for (text,) in [request.args for request in requests]:
            cut.append(list(windows(self.tok_encode(text), self.prefix_token_id, self.max_length)))
        scored = iter(self._score([pair for pairs in cut for pair in pairs], disable_tqdm))
        return [sum(next(scored).total for _ in pairs) for pairs in cut]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the task's stop strings, the model's end or the length."""
        prompts, params = [], []
        for context, asked in [request.args for request in requests]:
            one = generation_params(asked, self.max_gen_toks)
            room = self.max_length - (one.max_tokens or 0)
            if room < 1:
                rule = f"must be less than the context, {self.max_length}; ask for fewer"
                raise RequestError(f"max_gen_toks={one.max_tokens}: {rule}")
            prompts.append(self._kept(self.tok_encode(context), room))
            params.append(one)
        if not prompts:
            return []
        with _Bar(len(prompts), "generate_until", disable_tqdm) as bar:
            outputs = self.llm.generate(prompts, params, progress=bar.show)
        for i, output in enumerate(outputs):
            _check(i, output.outputs[0].error)
        return [output.outputs[0].text for output in outputs]

    def _fitted(self, context: list[int], continuation: list[int]) -> Pair:
        """A pair that fits, with what fits of the context, at least one token."""
        room = self.max_length - len(continuation)
        if room < 1:
            raise RequestError(
                f"a continuation of {len(continuation)} tokens and one before it do not fit into {self.max_length}"
            )
        kept = self._kept(context or [self.prefix_token_id], room)
        return Pair([*kept, *continuation], len(kept))

    def _kept(self, token_ids: list[int], room: int) -> list[int]:
        if len(token_ids) > room:
            log.warning("a context of %d tokens is cut to its last %d", len(token_ids), room)
        return token_ids[-room:]

    def _score(self, pairs: list[Pair], disable_tqdm: bool) -> list[Scored]:
        with _Bar(len(pairs), "loglikelihood", disable_tqdm) as bar:
            scored = score_pairs(self.llm, pairs, progress=bar.show)
        for i, one in enumerate(scored):
            _check(i, one.error)
        return scored


def generation_params(asked: Mapping[str, Any], max_gen_toks: int) -> SamplingParams:
    """The parameters of a task's `generation_kwargs`, as the harness means them. ParameterError for unknown ones.

    Without do_sample and temperature it is greedy, whatever filters are given; do_sample alone draws at temperature 1.
    """
    fields = dict(asked)
    lengths = [int(fields.pop(name)) for name in LENGTHS if fields.get(name) is not None]
    until, do_sample = fields.pop("until", None) or [], fields.pop("do_sample", None)
    if do_sample is False:
        fields["temperature"] = 0.0
    fields.setdefault("temperature", 1.0 if do_sample else 0.0)
    fields["stop"] = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    fields["max_tokens"] = lengths[0] if lengths else max_gen_toks
    return SamplingParams.from_dict(fields)


class _Bar:
    """A progress bar that `LLM.generate` moves."""

    def __init__(self, total: int, what: str, disable: bool) -> None:
        hidden = disable or not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=f"{what} requests", disable=hidden)

    def show(self, progress: Progress) -> None:
        self._bar.update(progress.done - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _check(i: int, error: str | None) -> None:
    """A number that stands for a failure would be averaged like any other."""
    if error is not None:
        raise ModelError(f"request {i} of the evaluation failed: {error}")


def _llm(pretrained: Any, batch_size: int | str | None, max_batch_size: int | None, options: dict[str, Any]) -> LLM:
    from klero.engine import LLM

    if not isinstance(pretrained, LLM):
        return LLM(pretrained, **({"seed": 0, "max_num_seqs": _num_seqs(batch_size, max_batch_size)} | options))
    sizes = {"batch_size": batch_size, "max_batch_size": max_batch_size}
    if given := [*(name for name, size in sizes.items() if size is not None), *options]:
        raise OptionError(f"{', '.join(given)}: the LLM is made already; give it its options when it is made")
    return pretrained


def _num_seqs(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """Sequences at a time, as the harness says it: a number, or "auto" with or without a count of tries."""
    if batch_size is None or str(batch_size).partition(":")[0] == "auto":
        return 64 if max_batch_size is None else int(max_batch_size)
    try:
        return int(batch_size)
    except ValueError:
        raise OptionError(f"batch_size={batch_size!r}: must be a number of sequences or 'auto'") from None
