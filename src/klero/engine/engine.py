"""Engine: requests in, finished requests out, one step at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from klero.batch import Blocks, InputBatch, Step
from klero.engine.models.protocol import Model
from klero.engine.outputs import Delta, RequestOutput
from klero.engine.request import Choice, Limits, Request, admit
from klero.engine.scheduler import Planned, Scheduler
from klero.engine.scores import PromptPart, StepRows, read_prompts
from klero.engine.seeds import SeedSource
from klero.engine.times import StepTimes
from klero.engine.words import Encode
from klero.errors import KleroError, OptionError, RequestError
from klero.finish import FinishReason, TokenBytes
from klero.params import SamplingParams, seed_bits
from klero.sampling.sampler import Sampler, Seat, TokenUpdate


class Engine:
    """Runs requests on a model: continuous batching, chunked prefill, sampling by slot.

    model: see `klero.engine.models.protocol.Model`. vocabulary: bytes of tokens, None for ids only. encode: text to ids
    without special tokens, for bad_words. padded_from: columns of the logits from here on are padding. max_num_seqs:
    sequences at a time. max_num_batched_tokens: tokens a step computes. block_size, num_blocks: the paged KV cache;
    num_blocks=None takes what `default_num_blocks` says. seed: makes the seeds of requests that bring none; None: the
    operating system. max_model_len: a context shorter than the model's own.

    times: where the time of the steps went. num_generated: tokens of all requests since the start. One thread at a time
    may call it.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocabulary: TokenBytes | None = None,
        encode: Encode | None = None,
        padded_from: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        check_sizes(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size)
        check_sizes(num_blocks=1 if num_blocks is None else num_blocks)
        self.model, self.vocabulary, self.encode = model, vocabulary, encode
        self.seeds = SeedSource(seed)
        self.max_model_len = _context(model, max_model_len)
        self.sampler = Sampler(
            num_slots=max_num_seqs, vocab_size=model.vocab_size, max_len=self.max_model_len, padded_from=padded_from
        )
        self.blocks: Blocks | None = None
        if model.uses_blocks:
            if num_blocks is None:
                num_blocks = default_num_blocks(model, block_size, max_num_seqs, self.max_model_len)
            self.blocks = Blocks(num_blocks, block_size, max_num_seqs, self.max_model_len)
            model.allocate(num_blocks, block_size)
        capacity = None if self.blocks is None else self.blocks.num_blocks * block_size
        end_ids = tuple(i for i in model.end_token_ids if 0 <= i < model.vocab_size)  # others can never be drawn
        self.limits = Limits(model.vocab_size, self.sampler.padded_from, self.max_model_len, capacity, end_ids)
        self.batch = InputBatch(max_num_seqs, max_num_batched_tokens, self.sampler.history, self.blocks)
        self.scheduler = Scheduler(
            max_num_seqs, max_num_batched_tokens, self.blocks, seat=self._seat, forget=self._forget
        )
        self._requests: dict[str, Request] = {}
        self._choice_of_slot: dict[int, Choice] = {}
        self._deltas: list[Delta] = []  # of requests that stream, until somebody takes them
        self._interrupted: list[Request] = []  # had a part in the step that failed last
        self.reproducible = bool(getattr(model, "deterministic", False))
        self.times, self.closed = StepTimes(), False
        self.num_generated = self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The ids of the requests that wait or run, in the order of arrival."""
        return tuple(self._requests)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of that name waits or runs; may be asked from any thread."""
        return request_id in self._requests

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        prompt_index: int = 0,
        stream: bool = False,
        arrived: float | None = None,
    ) -> Request:
        """Check a request and let it wait. Raises RequestError or ParameterError; the others go on.

        stream: its news comes out of `take_deltas`. arrived: when it was asked, by `time.perf_counter`; None: now.
        """
        if self.closed:
            raise RequestError("the engine is closed; make a new one")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r}: a request of that name is running; choose another")
        request = admit(request_id, prompt, prompt_ids, params, self.limits, self.vocabulary, self.encode)
        request.seed = self.seeds.next() if params.seed is None else seed_bits(params.seed)
        request.reproducible, request.stream, request.prompt_index = self.reproducible, stream, prompt_index
        if arrived is not None:
            request.clock.arrived = arrived
        self._requests[request_id] = request
        for choice in request.choices:
            self.scheduler.add(choice)
        return request

    def abort(self, request_id: str, message: str = "aborted by the caller") -> RequestOutput:
        """End a request with what it has so far. Raises RequestError for an unknown or finished one."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id={request_id!r}: no such request is waiting or running")
        return self._end(request, FinishReason.ABORT, message)

    def fail(self, message: str) -> list[RequestOutput]:
        """End with an error every request that had a part in the step that raised last; [] if that is not known."""
        hit = [request for request in self._interrupted if self._requests.get(request.request_id) is request]
        self._interrupted = []
        return [self._end(request, FinishReason.ERROR, message) for request in hit]

    def take_deltas(self) -> list[Delta]:
        """Return what came to the requests that stream since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def discard(self, request_ids: Iterable[str]) -> None:
        """Drop requests without an answer and free what nobody alive holds, whatever was cut short before."""
        if self.closed:
            return
        gone = set(request_ids)
        for request_id in gone:
            self._requests.pop(request_id, None)
        self._deltas = [delta for delta in self._deltas if delta.request_id not in gone]
        alive = [choice for request in self._requests.values() for choice in request.choices if not choice.finished]
        seated = {choice.slot: choice for choice in alive if choice.slot is not None}
        self.scheduler.keep(alive)
        self._choice_of_slot = {slot.index: choice for slot, choice in seated.items()}
        if self.blocks is not None:
            self.blocks.keep(self._choice_of_slot)
        for index in self.sampler.keep(seated):
            self.model.release(index)

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, forward, sample, finish. Returns the requests that finished in it."""
        times, self._interrupted = self.times, []
        times.start()
        planned = self.scheduler.schedule()
        times.lap("schedule")
        if not planned:
            if self._requests:
                raise KleroError(f"{len(self._requests)} requests are unfinished and none can run; abort them")
            return []
        try:
            arrays, rows = self.batch.fill([plan.scheduled for plan in planned]), self._step_of(planned)
            times.lap("inputs")
            logits = self.model.forward(arrays)
            times.lap("forward")
            parts = read_prompts(planned, arrays, logits, self.sampler.padded_from)
            logits = logits[: arrays.num_sampled] if parts else logits
            state = self.sampler.sample_async(rows, logits)
            times.lap("sample")
        except BaseException:
            self._start_over(planned)
            raise
        num_tokens = self._computed(planned)
        ended = self._score(planned, parts)  # first: whoever ends here is given no token
        ended += self._bring(self.sampler.update_requests(state), StepRows(state.host.logprobs, logits))
        outputs = self._answers(ended)
        times.lap("finish")
        times.count(num_tokens, rows.num_rows)
        return outputs

    def close(self) -> None:
        """Drop every request, the model and its cache; nothing runs afterwards. A second call does nothing."""
        if self.closed:
            return
        self.discard(self.unfinished)
        self.closed = True
        if hasattr(self.model, "close"):
            self.model.close()
        elif self.blocks is not None:
            self.model.allocate(1, self.blocks.block_size)  # whoever else holds the model holds no cache with it
        del self.model

    def _start_over(self, planned: list[Planned]) -> None:
        """After a step that failed nobody knows what the model holds: its sequences are computed again."""
        self._interrupted = list(dict.fromkeys(choice.request for choice, _ in planned))
        for choice, _ in sorted(planned, key=lambda plan: -plan.choice.arrival):  # the oldest comes to stand in front
            self.scheduler.preempt(choice)

    def _computed(self, planned: list[Planned]) -> int:
        """Note what the step computed, for each sequence; the tokens in all."""
        num_tokens = 0
        self._num_steps += 1
        for choice, scheduled in planned:
            begin, end = choice.num_computed, choice.num_computed + scheduled.num_new
            num_prompt = len(choice.request.prompt_ids)
            choice.request.clock.take_part(self._num_steps, min(end, num_prompt) - min(begin, num_prompt))
            choice.num_computed = end
            num_tokens += scheduled.num_new
        return num_tokens

    def _step_of(self, planned: list[Planned]) -> Step:
        """The rows of the sequences that reach the end of what they have."""
        slots = [choice.slot for choice, scheduled in planned if scheduled.samples and choice.slot is not None]
        return self.sampler.step_of(slots)

    def _score(self, planned: list[Planned], parts: list[tuple[Choice, PromptPart]]) -> list[Request]:
        """Take what the step says about prompts, and end what is only scored; the requests that may be done."""
        ended = []
        for choice, part in parts:
            assert choice.prompt_scores is not None
            choice.prompt_scores.take(part)
            if part.error is not None:
                self._end_choices(choice.request, FinishReason.ERROR, part.error)
                ended.append(choice.request)
        for choice, _ in planned:
            if not choice.draws and choice.finished is None and choice.num_computed == choice.num_tokens:
                choice.finished = choice.finish.end(FinishReason.LENGTH)
                self._hand_out(choice)
                ended.append(choice.request)
        return ended

    def _bring(self, updates: list[TokenUpdate], said: StepRows) -> list[Request]:
        """Give the choices their tokens and what is said about them, end those that are done; their requests."""
        ended = []
        for update in updates:
            choice = self._choice_of_slot[update.slot.index]
            self.num_generated += len(update.token_ids)
            if update.error is not None:
                choice.finished = choice.finish.end(FinishReason.ERROR, update.error)
            elif update.finished is not None:
                choice.finished = update.finished
            if choice.finish.num_tokens:
                choice.request.clock.drew()
            choice.take(said, update.rows)
            self._hand_out(choice, update.token_ids)
            if choice.finished is not None:
                ended.append(choice.request)
        return ended

    def _hand_out(self, choice: Choice, token_ids: tuple[int, ...] = ()) -> None:
        """Let a choice's news out if it streams, and free what it holds if it has finished."""
        if choice.request.stream:
            self._deltas.append(choice.delta(token_ids))
        if choice.finished is not None:
            self._leave(choice)

    def _answers(self, ended: list[Request]) -> list[RequestOutput]:
        """The answers of those of these requests whose choices all have finished."""
        done = [request for request in dict.fromkeys(ended) if all(c.finished is not None for c in request.choices)]
        for request in done:
            del self._requests[request.request_id]
        return [request.output() for request in done]

    def _end(self, request: Request, reason: FinishReason, message: str) -> RequestOutput:
        """End a request from outside, with what it has so far."""
        self._end_choices(request, reason, message)
        (output,) = self._answers([request])
        return output

    def _end_choices(self, request: Request, reason: FinishReason, message: str) -> None:
        """End what is not finished of a request."""
        for choice in request.choices:
            if choice.finished is None:
                choice.finished = choice.finish.end(reason, message)
                self._hand_out(choice)

    def _seat(self, choice: Choice) -> None:
        """Give a choice its slot."""
        request = choice.request
        seat = Seat(
            choice.owner, request.params, request.prompt_ids, request.seed, choice.index, choice.finish,
            end_token_ids=self.limits.end_token_ids, bad_word_ids=request.bad_word_ids,
        )  # fmt: skip
        (choice.slot,) = self.sampler.setup_step([seat])
        self._choice_of_slot[choice.slot.index] = choice

    def _forget(self, choice: Choice) -> None:
        """Tell the model that a sequence's state is gone."""
        if choice.slot is not None:
            self.model.release(choice.slot.index)

    def _leave(self, choice: Choice) -> None:
        """Free everything that a choice holds, once."""
        self.scheduler.remove(choice)
        if choice.slot is not None:
            self.sampler.release(choice.slot)
            del self._choice_of_slot[choice.slot.index]
            choice.slot = None


def default_num_blocks(model: Model, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks for max_num_seqs full contexts, or what 4 GiB hold if that is less; always enough for one context."""
    of_context = -(-max_model_len // block_size)
    bytes_per_block = max(1, model.bytes_per_block(block_size))
    return max(of_context, min(of_context * max_num_seqs, 4 * 2**30 // bytes_per_block))


def _context(model: Model, asked: int | None) -> int:
    """The context length: the model's own, or a shorter one that was asked for."""
    if asked is None:
        return model.max_model_len
    check_sizes(max_model_len=asked)
    if asked > model.max_model_len:
        raise OptionError(f"max_model_len={asked}: the model's context is {model.max_model_len}; ask for no more")
    return asked


def check_sizes(**sizes: Any) -> None:
    """Raise OptionError for the first that is no integer >= 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
            raise OptionError(f"{name}={value!r}: must be an integer >= 1")
