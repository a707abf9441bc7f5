"""Requests that rewrite their rows, in the engine: the same tokens in any company, and errors that stay their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.engine.free import assert_all_free

from klero import ParameterError, Sampler, SamplingParams, Seat, sample
from klero.engine import LLM, Engine
from klero.finish import Finish
from klero.params import top_p_after
from klero.testing.models import PagedToyModel, ToyModel, logits_of_state, state_after

WIDTH = 32
MODELS = [ToyModel, PagedToyModel]
PROMPT, OTHER = [1, 2, 3, 4, 2, 3], [5, 6, 7]


def lean(token_ids, row):
    """A processor: what came last is less likely, what came before it more."""
    row[token_ids[-1]] -= 0.5
    row[token_ids[-2]] += 0.25


def most(row):
    """A filter of one's own: all but the last eighth."""
    return max(1, len(row) - len(row) // 8)


# with kernels; and what makes the reference do it
KERNEL = SamplingParams(
    temperature=1.2, seed=6, max_tokens=16, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    prompt_ignore_length=2, logit_bias={5: 1.5, 7: -np.inf, 9: -2}, bad_token_ids=[13, [14, 16], [2, 3, 8]],
    no_repeat_ngram_size=2, min_tokens=12, stop_token_ids=[11, [12, 17]], allowed_token_ids=[*range(28), 30],
    top_p=0.98, top_p_decay=0.9, top_p_min=0.5, top_p_reset_id=10, top_n_sigma=2.5, epsilon_cutoff=0.015, top_a=0.3,
    xtc_probability=0.5, xtc_threshold=0.06,
)  # fmt: skip
HOSTED = SamplingParams(
    **KERNEL.asked(), logits_processors=lean, filters=most, typical_p=0.99, embedding_bias=np.linspace(-1, 1, WIDTH)
)
ASKED = pytest.mark.parametrize("params", [KERNEL, HOSTED], ids=["kernel", "hosted"])
PLAIN = [
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=1.0, seed=8, max_tokens=14),
    SamplingParams(temperature=0.8, seed=9, top_p=0.9, min_p=0.02, max_tokens=14),
]


def model_of(kind=ToyModel, **options):
    return kind(**{"vocab_size": WIDTH, "end_token_ids": [0]} | options)


def by_hand(prompt, params, *, child=0, num_columns=WIDTH, backend="auto"):
    """What `klero.sample` says, told the history anew for every token."""
    finish = Finish(params, end_token_ids=[0], prompt_ids=prompt, vocabulary=None, max_tokens=params.max_tokens)
    state, tokens = 0, list(prompt)
    for position, token in enumerate(prompt):
        state = state_after(state, token, position)
    while finish.finished is None:
        row = np.full((1, WIDTH), np.nan, np.float32)
        row[0, :num_columns] = logits_of_state(state, num_columns, 4.0)
        drawn = sample(
            row, params, prompts=[prompt], outputs=[tokens[len(prompt) :]], children=child, end_token_ids=[0],
            padded_from=num_columns, backend=backend,
        )  # fmt: skip
        assert drawn.status[0] == 0, drawn.messages
        token = int(drawn.token_ids[0])
        state = state_after(state, token, len(tokens))
        tokens.append(token)
        finish.push(token)
    return finish.token_ids


def run(engine, requests, after_step=lambda: None):
    """Step to the end: the outputs by name. requests: {name: (prompt, params)}."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    outputs = {}
    while engine.num_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        after_step()
    assert_all_free(engine)
    return outputs


def tokens_of(outputs):
    return {name: [choice.token_ids for choice in output.outputs] for name, output in outputs.items()}


@pytest.mark.parametrize("kind", MODELS)
@ASKED
def test_alone_it_says_what_klero_sample_says(params, kind):
    right = by_hand(PROMPT, params, backend="reference")
    assert right == by_hand(PROMPT, params, backend="cpu")
    assert len(right) >= 12
    assert tokens_of(run(Engine(model_of(kind)), {"a": (PROMPT, params)})) == {"a": [right]}


def test_every_rule_has_a_say():
    """Without any one of the fields the tokens are others, for some seed, so the tests here would see it ignored."""
    asked = HOSTED.asked()
    needs = {"top_p_decay": ("top_p_min", "top_p_reset_id")}
    seeds = range(12)
    right = [by_hand(PROMPT, SamplingParams(**asked | {"seed": seed})) for seed in seeds]
    for name in asked.keys() - {"temperature", "max_tokens", "seed", "xtc_threshold"}:
        without = {key: value for key, value in asked.items() if key not in (name, *needs.get(name, ()))}
        changed = (by_hand(PROMPT, SamplingParams(**without | {"seed": seed})) != right[seed] for seed in seeds)
        assert any(changed), name


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_neighbours_and_chunks_change_nothing(kind, budget):
    requests = {f"plain {i}": (OTHER, params) for i, params in enumerate(PLAIN)}
    requests |= {"kernel": (PROMPT, KERNEL), "hosted": (PROMPT, HOSTED), "later": (OTHER, KERNEL)}
    engine = Engine(model_of(kind), max_num_seqs=4, max_num_batched_tokens=budget, block_size=3)
    assert tokens_of(run(engine, requests)) == {name: [by_hand(*asked)] for name, asked in requests.items()}


@ASKED
def test_preempted_at_any_position_it_goes_on_as_if_nothing_was(params):
    right = by_hand(PROMPT, params)
    for k in range(len(right)):
        engine = Engine(model_of(PagedToyModel), max_num_batched_tokens=4, block_size=3)
        choices = []

        def preempt(k=k, engine=engine, choices=choices):
            if not choices:
                choices.extend(engine.scheduler.running)
            (choice,) = choices
            if choice.finish.num_tokens == k and choice.running and not engine.scheduler.num_preemptions:
                engine.scheduler.preempt(choice)

        assert tokens_of(run(engine, {"a": (PROMPT, params)}, preempt)) == {"a": [right]}, k
        assert engine.scheduler.num_preemptions == 1


@ASKED
def test_counts_and_decay_follow_from_the_tokens(params):
    """Preempted after every token; beside it a sampler that is given the tokens so far, as after a move elsewhere."""
    engine = Engine(model_of(PagedToyModel), max_num_seqs=2, block_size=4)
    other = Sampler(num_slots=1, vocab_size=WIDTH, max_len=64)
    engine.add_request("a", PROMPT, params)
    engine.step()
    (choice,) = engine.scheduler.running
    while choice.finished is None:
        output, index = choice.finish.token_ids, choice.slot.index
        seat = Seat("b", params, PROMPT, params.seed, output_ids=output, end_token_ids=[0])
        (moved,) = other.setup_step([seat])
        assert engine.sampler.columns["top_p"][index] == top_p_after(params.decay, output)
        assert other.columns["top_p"][moved.index] == top_p_after(params.decay, output)
        assert engine.sampler.columns["row"][index] == other.columns["row"][moved.index]
        counted = [*PROMPT[params.prompt_ignore_length :], *output]
        right = {token: counted.count(token) for token in [*PROMPT, *output]}
        for sampler, at in ((engine.sampler, index), (other, moved.index)):
            rules = sampler.rules.arrays()
            n = rules.num_seen[at]
            assert dict(zip(rules.seen_ids[at, :n].tolist(), rules.seen_counts[at, :n].tolist(), strict=True)) == right
        other.release(moved)
        engine.scheduler.preempt(choice)
        engine.step()
    assert choice.finish.token_ids == by_hand(PROMPT, params)
    assert engine.scheduler.num_preemptions == len(choice.finish.token_ids) - 1


@ASKED
def test_the_choices_of_a_request_share_no_state(params):
    three = SamplingParams(**params.asked() | {"n": 3})
    right = [by_hand(PROMPT, params, child=child) for child in range(3)]
    assert len(set(right)) == 3
    for max_num_seqs, budget in itertools.product((1, 2, 3), (3, 64)):
        engine = Engine(model_of(PagedToyModel), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        assert tokens_of(run(engine, {"a": (PROMPT, three)})) == {"a": right}


@ASKED
def test_a_slot_is_neutral_for_the_next(params):
    engine = Engine(model_of(), max_num_seqs=1)
    right = by_hand(PROMPT, params)
    for plain in PLAIN:
        requests = {"a": (PROMPT, params), "plain": (OTHER, plain), "again": (PROMPT, params)}
        solo = {"a": [right], "plain": [by_hand(OTHER, plain)], "again": [right]}
        assert tokens_of(run(engine, requests)) == solo


def spoilt(kind, prompt_starts, position, change):
    """A model whose row for a position of the sequences whose prompt starts with a token is changed."""

    class Spoilt(kind):
        first: dict[int, int]

        def forward(self, step):
            logits, row_of = super().forward(step), {t: r for r, t in enumerate(step.logits_rows.tolist())}
            for n, slot in enumerate(step.slots.tolist()):
                begin, last = int(step.query_starts[n]), int(step.query_starts[n + 1]) - 1
                if step.positions[begin] == 0:
                    self.first[slot] = int(step.input_ids[begin])
                if self.first.get(slot) == prompt_starts and step.positions[last] + 1 == position and last in row_of:
                    change(logits[row_of[last]])
            return logits

        def release(self, slot):
            self.first.pop(slot, None)  # whoever sits there next may begin behind a cached prefix
            super().release(slot)

    model = model_of(Spoilt)
    model.first = {}
    return model


def failing_processor(token_ids, row):
    if len(token_ids) == 7:
        raise RuntimeError("the seventh")


def wrong_processor(token_ids, row):
    return row[:-1] if len(token_ids) == 7 else row


def failing_filter(row):
    if np.isinf(row.logits).any() or len(row) < WIDTH - 3:
        raise RuntimeError("too few")
    return len(row)


def nan(row):
    row[:] = np.where(np.arange(WIDTH) == 7, np.nan, row)


def everything_banned(row):
    row[:] = -np.inf


HOT = {"temperature": 1.0, "seed": 4, "max_tokens": 9}
TRAP = {"allowed_token_ids": [24, 25], "no_repeat_ngram_size": 1, "bad_token_ids": [13]}
FAILURES = {
    "a processor raises": ({"logits_processors": failing_processor}, None, 4, "RuntimeError: the seventh"),
    "a processor returns another shape": ({"logits_processors": [lean, wrong_processor]}, None, 4, r"\(31,\)"),
    "a filter raises": ({"filters": failing_filter, "no_repeat_ngram_size": 1}, None, 1, "RuntimeError: too few"),
    "NaN where a ban hides it": ({"bad_token_ids": [7]}, nan, 4, "position 7"),
    "NaN before a processor": ({"logits_processors": lean}, nan, 4, "position 7"),
    "an empty row of the model": ({"repetition_penalty": 1.5}, everything_banned, 4, "no token is left for position 7"),
    "rules that leave nothing": (TRAP, None, 2, "position 5 after the bans of allowed_token_ids, no_repeat_ngram_size"),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_ends_its_own_request_alone(failure, kind):
    fields, change, num_tokens, told = FAILURES[failure]
    bad = SamplingParams(**HOT | fields)
    others = {"kernel": (PROMPT, KERNEL), "hosted": (PROMPT, HOSTED), "plain": (OTHER, PLAIN[1])}
    for budget in (2, 64):
        engine = Engine(spoilt(kind, 9, 7, change or (lambda row: None)), max_num_batched_tokens=budget, block_size=3)
        outputs = run(engine, {"bad": ([9, 8, 10], bad)} | others)
        (choice,) = outputs.pop("bad").outputs
        assert choice.finish_reason == "error"
        assert told.replace("\\", "") in choice.error
        assert len(choice.token_ids) == num_tokens
        assert tokens_of(outputs) == {name: [by_hand(*asked)] for name, asked in others.items()}
        # its slot is as good as new
        assert tokens_of(run(engine, others)) == tokens_of(outputs)


@ASKED
def test_an_abort_in_the_middle_frees_everything_and_moves_nobody(params):
    for k in range(1, 9):
        engine = Engine(model_of(PagedToyModel), max_num_seqs=3, max_num_batched_tokens=4, block_size=3)
        engine.add_request("gone", PROMPT, SamplingParams(**params.asked() | {"n": 2}))
        for _ in range(k):
            engine.step()
        for i, choice in enumerate(engine.abort("gone").outputs):
            assert choice.finish_reason == "abort"
            assert choice.token_ids == by_hand(PROMPT, params, child=i)[: len(choice.token_ids)]
        assert_all_free(engine)
        requests = {"plain": (OTHER, PLAIN[2]), "again": (PROMPT, params)}
        assert tokens_of(run(engine, requests)) == {name: [by_hand(*asked)] for name, asked in requests.items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padding", [50.0, np.nan, np.inf, -np.inf])
def test_padding_is_never_drawn_and_harms_nobody(padding, kind):
    """Columns from 28 on. The rules name some of them, and a prompt holds one: they do nothing there."""

    class Padded(kind):
        def forward(self, step):
            logits = super().forward(step)
            logits[:, 28:] = padding
            return logits

    named = {"logit_bias": {5: 1.5, 30: 99, 31: -np.inf}, "bad_token_ids": [13, 29, [3, 30]]}
    requests = {f"plain {i}": (OTHER, params) for i, params in enumerate(PLAIN)}
    requests |= {"kernel": ([30, *PROMPT], KERNEL), "hosted": ([31, *PROMPT], HOSTED)}
    requests |= {"named": (PROMPT, SamplingParams(**KERNEL.asked() | named))}
    engine = Engine(model_of(Padded), padded_from=28, max_num_batched_tokens=16)
    said = tokens_of(run(engine, requests))
    assert said == {name: [by_hand(*asked, num_columns=28)] for name, asked in requests.items()}
    assert max(itertools.chain.from_iterable(tokens for (tokens,) in said.values())) < 28


def test_what_the_engine_cannot_do_is_refused_and_the_others_go_on():
    engine = Engine(model_of(PagedToyModel), block_size=4)
    engine.add_request("good", PROMPT, KERNEL)
    done = engine.step()
    for fields, words in [
        ({"bad_words": "x"}, "tokenizer"),
        ({"logit_bias": {32: 1}}, "logit_bias"),
        ({"bad_token_ids": [[1, 32]]}, "bad_token_ids"),
        ({"allowed_token_ids": [1, 32]}, "allowed_token_ids"),
        ({"top_p_decay": 0.5, "top_p_reset_id": 32}, "top_p_reset_id"),
        ({"embedding_bias": [0.0] * 31}, "embedding_bias"),
    ]:
        with pytest.raises(ParameterError, match=words):
            engine.add_request("bad", [1], SamplingParams(**fields))
    done += run(engine, {}).values()
    assert [o.outputs[0].token_ids for o in done] == [by_hand(PROMPT, KERNEL)]


def test_a_bad_word_with_no_tokens_is_refused():
    engine = Engine(model_of(), encode=lambda text: [] if text == "?" else [3])
    with pytest.raises(ParameterError, match="no tokens"):
        engine.add_request("bad", [1], SamplingParams(bad_words=["a", "?"]))
    assert_all_free(engine)


def test_a_live_module_never_says_a_bad_word():
    """A tiny random model with bytes for tokens: ban what it says, a byte, then two that follow each other."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tests.engine.test_chat import make_tokenizer

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=256, eos_token_id=None,
    )  # fmt: skip
    llm = LLM(transformers.LlamaForCausalLM(config), tokenizer=make_tokenizer(None))
    letters = SamplingParams(
        temperature=1.0, seed=2, max_tokens=40, allowed_token_ids=llm.tokenizer.encode("abc ", add_special_tokens=False)
    )

    def text(**fields):
        return llm.generate("aabb", SamplingParams(**letters.asked(), **fields))[0].outputs[0].text

    assert "b" in text()
    assert "ca" in text()
    assert "b" not in text(bad_words="b")
    assert "ca" not in text(bad_words=["ca"])
    (hot,) = llm.generate("a", SamplingParams(temperature=100.0, seed=1, max_tokens=50))
    assert max(hot.outputs[0].token_ids) < 257  # the tokenizer has no more, though the logits do
