"""Engine: requests in, finished requests out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch import InputBatch, SchedulerOutput, Step, StepArrays
from klero.engine.admission import NewRequest, admit, check_queue, limits_of
from klero.engine.guides import Guides
from klero.engine.models.protocol import Model
from klero.engine.options import account_of, context_of, options_of
from klero.engine.outputs import Delta, RequestOutput
from klero.engine.request import Choice, Request
from klero.engine.runner import Runner, weights_version
from klero.engine.scheduler import Plan, Planned, Scheduler
from klero.engine.scores import PromptPart, StepRows, read_prompts
from klero.engine.seeds import SeedSource
from klero.engine.times import StepTimes
from klero.engine.words import Encode
from klero.errors import KleroError, RequestError, told
from klero.finish import FinishReason, TokenBytes
from klero.grammar.protocol import Compiled
from klero.grammar.thinking import Marks
from klero.params import SamplingParams, seed_bits
from klero.sampling.sampler import Sampler, SampleState, TokenUpdate
from klero.sampling.status import OK


class Engine:
    """Runs requests on a model: continuous batching, chunked prefill, sampling by slot.

    model: see `klero.engine.models.protocol.Model`. vocabulary: bytes of tokens, None for ids only. encode: text to ids
    without special tokens, for bad_words. padded_from: columns of the logits from here on are padding. marks: where the
    model's thinking begins and ends. seed: makes the seeds of requests that bring none; None: the operating system.
    options: the fields of `EngineOptions`.

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
        marks: Marks | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.options = asked = options_of(**options)
        self.model, self.vocabulary, self.encode = model, vocabulary, encode
        self.seeds = SeedSource(seed)
        self.max_model_len = context_of(model, asked.max_model_len)
        sizes = {"max_num_batched_tokens": asked.max_num_batched_tokens, "max_len": self.max_model_len}
        self.sampler = Sampler(
            num_slots=asked.max_num_seqs, vocab_size=model.vocab_size, max_len=self.max_model_len,
            padded_from=padded_from,
        )  # fmt: skip
        self.kv = account_of(model, asked, self.max_model_len)
        self.limits = limits_of(model, asked, self.sampler.padded_from, self.max_model_len, self.kv)
        self.guides = Guides(
            asked.grammar_backend, vocabulary, self.sampler.padded_from, marks, self.limits.end_token_ids
        )
        block_size = None if self.kv is None else asked.block_size
        self.batch = InputBatch(max_num_seqs=asked.max_num_seqs, block_size=block_size, seats=self.sampler, **sizes)
        self.runner = Runner(model, asked, self.batch.block_tables.shape[1])
        self.scheduler = Scheduler(asked, self.kv, self.limits.end_token_ids, shares=hasattr(model, "move_blocks"))
        self._requests: dict[str, Request] = {}
        self._choice_of_slot: dict[int, Choice] = {}
        self._deltas: list[Delta] = []  # of requests that stream, until somebody takes them
        self._leaving: list[Choice] = []  # have ended, and their seats are not free yet
        self._unanswered: list[Request] = []  # have ended, and nobody was told, as an exception came before
        self._interrupted: list[Request] = []  # had a part in the step that failed last
        self._whole = True  # False: something was cut short, and nobody knows what batch and blocks hold
        self._weights = weights_version(model)
        self.reproducible = bool(getattr(model, "deterministic", False))
        self.times, self.closed = StepTimes(), False
        self.num_generated = self._num_steps = 0

    @property
    def dtype(self) -> str:
        """What the model computes in, such as "bfloat16"; "" for a model that does not say."""
        return str(getattr(getattr(self.model, "module", None), "dtype", "")).removeprefix("torch.")

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
        prompt_embeds: npt.NDArray[np.float32] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        compiled: Future[Compiled] | None = None,
    ) -> Request:
        """Check a request and let it wait. Raises RequestError or ParameterError; the others go on.

        stream: its news comes out of `take_deltas`. arrived: when it was asked, by `time.perf_counter`; None: now.
        prompt_embeds: float32 [E, H], positions before those of prompt_ids, which may be empty then. priority: lower
        goes first, where the policy says so. cache_salt: cached prefixes are shared with requests of the same salt
        alone. compiled: its grammar, as `guides.prepare` gave it; None: it is waited for here. QueueFullError: as many
        choices wait as may.
        """
        if self.closed:
            raise RequestError("the engine is closed; make a new one")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r}: a request of that name is running; choose another")
        check_queue(request_id, params, len(self.scheduler.waiting), self.options.max_num_waiting)
        asked = NewRequest(request_id, prompt, prompt_ids, params, prompt_embeds, cache_salt, priority, compiled)
        width = None if prompt_embeds is None else getattr(self.model, "hidden_size", None)  # asked where it matters
        request = admit(asked, self.limits, self.guides, self.vocabulary, self.encode, width)
        request.seed = self.seeds.next() if params.seed is None else seed_bits(params.seed)
        request.reproducible, request.stream, request.prompt_index = self.reproducible, stream, prompt_index
        request.clock = self.times.clock(request.num_prompt, arrived)
        with self._changing():
            self._look_at_weights()
            self._requests[request_id] = request
            for choice in request.choices:
                if choice.computes:
                    self.scheduler.add(choice)
        return request

    def abort(self, request_id: str, message: str = "aborted by the caller") -> RequestOutput:
        """End a request with what it has so far. Raises RequestError for an unknown or finished one."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id={request_id!r}: no such request is waiting or running")
        with self._changing():
            return self._end(request, FinishReason.ABORT, message)

    def fail(self, message: str) -> list[RequestOutput]:
        """End with an error every request that had a part in the step that raised last; [] if that is not known."""
        hit = [request for request in self._interrupted if self._requests.get(request.request_id) is request]
        self._interrupted = []
        with self._changing():
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
        with self._changing():
            for request in [request for name, request in self._requests.items() if name in gone]:
                for choice in request.choices:
                    if choice.finished is None:
                        self._remove(choice)
                del self._requests[request.request_id]
            self._vacate()
            self._deltas = [delta for delta in self._deltas if delta.request_id not in gone]

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, forward, sample, finish. Returns the requests that finished in it."""
        times, self._interrupted = self.times, []
        times.start()
        with self._changing():
            plan = self.scheduler.schedule()
            times.lap("schedule")
            if not plan.planned:
                if outputs := self._answers(list(self._requests.values())):  # an interrupt came before
                    return outputs
                if self._requests:
                    raise KleroError(f"{len(self._requests)} requests are unfinished and none can run; abort them")
                return []
            try:
                arrays, rows = self._lay_out(plan)
                self.sampler.begin_masks(rows)
                times.lap("inputs")
                logits = self.runner.forward(plan.output.moves, arrays)
                times.lap("forward")
                parts = read_prompts(plan.planned, arrays, logits, self.sampler.padded_from)
                logits = logits[: arrays.num_sampled] if parts else logits
                state = self.sampler.sample_async(rows, logits)
                times.lap("sample")
            except BaseException:
                self._interrupted = list(dict.fromkeys(choice.request for choice, *_ in plan.planned))
                self._start_over()
                self._whole = True
                raise
            num_tokens = self._computed(plan.planned, state)
            ended = self._unanswered + self._score(plan.planned, parts)  # first: whoever ends here is given no token
            ended += self._bring(self.sampler.update_requests(state), StepRows(state.host.logprobs, logits))
            outputs, self._unanswered = self._answers(ended), []
        times.lap("finish")
        times.count(num_tokens, rows.num_rows)
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Changed weights are seen by themselves, but for what the model cannot see."""
        if self.kv is not None:
            self.kv.forget()

    def close(self) -> None:
        """Drop every request, the model and its cache; nothing runs afterwards. A second call does nothing."""
        if self.closed:
            return
        self.discard(self.unfinished)
        self.closed = True
        self.guides.grammars.close()
        self.sampler.matchers.close()
        if hasattr(self.model, "close"):
            self.model.close()
        elif self.kv is not None:
            self.model.allocate(1, self.kv.blocks.block_size)  # whoever else holds the model holds no cache with it
        del self.model, self.runner

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change what is kept; whatever cuts it short, the next change begins with `_start_over`."""
        if not self._whole:
            self._start_over()
        self._whole = False
        yield
        self._whole = True

    def _start_over(self) -> None:
        """Nobody knows what batch, blocks and model hold: every sequence is seated and computed again.

        One whose token came only halfway ends with an error.
        """
        for request in self._requests.values():
            if any(c.finished is None and c.finish.num_tokens != c.num_brought for c in request.choices):
                self._break_off(request)
        self._unanswered = [r for r in self._requests.values() if all(c.finished is not None for c in r.choices)]
        self._leaving = []
        alive = [c for r in self._requests.values() for c in r.choices if c.finished is None and c.computes]
        self.scheduler.start_over(alive)
        for index in self.batch.keep(()):
            self.model.release(index)
        self._choice_of_slot = {}

    def _break_off(self, request: Request) -> None:
        """End a request of which nobody knows what its last step brought."""
        running = [choice for choice in request.choices if choice.finished is None]
        request.fail("the step was interrupted while its token was brought; ask again")
        if request.stream:
            self._deltas += [choice.delta() for choice in running]

    def _lay_out(self, plan: Plan) -> tuple[StepArrays, Step]:
        """Tell the batch what the step does, and take its arrays and rows."""
        output = plan.output
        for id in (*output.finished, *output.preempted):
            self.model.release(self.batch.slot_of(id).index)
        for id in output.finished:  # whose seat another one takes
            self._choice_of_slot.pop(self.batch.slot_of(id).index).slot = None
        self.batch.update(output)
        for choice, *_ in plan.planned:
            if choice.slot is None:
                choice.slot = self.batch.slot_of(choice.id)
                self._choice_of_slot[choice.slot.index] = choice
        return self.batch.fill()

    def _computed(self, planned: Sequence[Planned], state: SampleState) -> int:
        """Note what the step computed, for each sequence; the tokens in all."""
        self._num_steps += 1
        num_rows = state.step.row_starts[-1]  # those behind are padding
        bad = set(state.step.slot_of_row[:num_rows][state.host.status[:num_rows] != OK].tolist())
        for plan in planned:
            choice, begin, end, num_prompt = plan.choice, plan.num_computed, plan.end, plan.choice.num_prompt
            choice.request.clock.take_part(self._num_steps, min(end, num_prompt) - min(begin, num_prompt))
            assert choice.slot is not None
            self.scheduler.computed(plan, good=choice.slot.index not in bad)
        return sum(plan.num_new for plan in planned)

    def _score(self, planned: Sequence[Planned], parts: list[tuple[Choice, PromptPart]]) -> list[Request]:
        """Take what the step says about prompts, and end what is only scored; the requests that may be done."""
        ended = []
        for choice, part in parts:
            assert choice.prompt_scores is not None
            choice.prompt_scores.take(part)
            if part.error is not None:
                self._end_choices(choice.request, FinishReason.ERROR, part.error)
                ended.append(choice.request)
        for choice, *_ in planned:
            if not choice.draws and choice.finished is None and choice.num_computed == choice.num_tokens:
                self._end_choices(choice.request, FinishReason.LENGTH)  # those that computed nothing as well
                ended.append(choice.request)
        self._vacate()
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
            choice.num_brought = choice.finish.num_tokens
            if choice.finished is not None:
                ended.append(choice.request)
        self._vacate()
        return ended

    def _hand_out(self, choice: Choice, token_ids: tuple[int, ...] = ()) -> None:
        """Let a choice's news out if it streams, and free what it holds if it has finished."""
        if choice.request.stream:
            self._deltas.append(choice.delta(token_ids))
        if choice.finished is not None:
            self._remove(choice)

    def _answers(self, ended: list[Request]) -> list[RequestOutput]:
        """The answers of those of these requests whose choices all have finished, unless they were given already."""
        here = [request for request in dict.fromkeys(ended) if self._requests.get(request.request_id) is request]
        done = [request for request in here if all(choice.finished is not None for choice in request.choices)]
        outputs = [_answer(request) for request in done]
        for request in done:
            del self._requests[request.request_id]
        self.times.ended(outputs)
        return outputs

    def _end(self, request: Request, reason: FinishReason, message: str) -> RequestOutput:
        """End a request from outside, with what it has so far."""
        self._end_choices(request, reason, message)
        self._vacate()
        (output,) = self._answers([request])
        return output

    def _end_choices(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        """End what is not finished of a request."""
        for choice in request.choices:
            if choice.finished is None:
                choice.finished = choice.finish.end(reason, message)
                self._hand_out(choice)

    def _remove(self, choice: Choice) -> None:
        """Free the blocks of a choice that has ended, once; its seat follows in `_vacate`."""
        if choice.computes:
            self.scheduler.remove(choice)
        if choice.slot is not None:
            self._leaving.append(choice)

    def _vacate(self) -> None:
        """Free the seats of those that have ended, in one record."""
        if not self._leaving:
            return
        self.batch.update(SchedulerOutput(finished=tuple(choice.id for choice in self._leaving)))
        for choice in self._leaving:
            assert choice.slot is not None
            self.model.release(choice.slot.index)
            del self._choice_of_slot[choice.slot.index]
            choice.slot = None
        self._leaving = []

    def _look_at_weights(self) -> None:
        """Forget cached prefixes when the weights are others than before; looked at when nothing runs."""
        if self.kv is not None and not self._requests:
            before, self._weights = self._weights, weights_version(self.model)
            if before != self._weights:
                self.kv.forget()


def _answer(request: Request) -> RequestOutput:
    """The answer of a request; if it cannot be put together (no memory), the request ends in error, and no other."""
    try:
        return request.output()
    except Exception as error:
        message = f"the answer could not be put together: {told(error)}"
    request.fail(message)
    return request.output()
