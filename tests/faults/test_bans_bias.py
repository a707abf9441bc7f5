"""Cases from the field, kind bans_bias: what may not be said, and ids that are no tokens."""

import numpy as np
import pytest
from tests.faults.rows import BACKENDS, RowsModel, banned, row_after

from klero import ParameterError, Sampler, SamplingParams, Seat, sample
from klero.engine import LLM, Engine
from klero.engine.words import bad_word_ids
from klero.testing.models import ToyModel

TOKENS = {"harbour": [2, 3], " harbour": [6]}
BOTH = ((2, 3), (6,))


def test_BN_01_both_tokenisations_are_recorded_whatever_their_lengths():
    assert bad_word_ids(["harbour"], TOKENS.__getitem__, 8) == BOTH
    assert bad_word_ids(["harbour", "harbour"], TOKENS.__getitem__, 8) == BOTH


@pytest.mark.parametrize("backend", BACKENDS)
def test_BN_01_the_spaced_form_is_banned_too(backend):
    fields = {"bad_words": "harbour", "bad_word_ids": BOTH}
    assert banned(backend, 8, [0], [], **fields) == [6]
    assert banned(backend, 8, [0], [2], **fields) == [3, 6]
    sampler = Sampler(num_slots=1, vocab_size=8, max_len=8, backend=backend)
    (slot,) = sampler.setup_step([Seat("a", SamplingParams(bad_words="harbour"), [0], seed=0, bad_word_ids=BOTH)])
    said = []
    for row in ([0, 1, 0, 0, 0, 0, 9, 0], [0, 1, 5, 0, 0, 0, 9, 0], [0, 1, 0, 9, 0, 0, 8, 0]):
        state = sampler.sample_async(sampler.step_of([slot]), np.float32([row]))
        said += sampler.update_requests(state)[0].token_ids
    assert said == [1, 2, 1]


def test_BN_01_by_an_engine_with_an_encoder():
    model = RowsModel([[0, 1, 0, 0, 0, 0, 9, 0], [0, 1, 5, 0, 0, 0, 9, 0], [0, 1, 0, 9, 0, 0, 8, 0]])
    engine = Engine(model, encode=TOKENS.__getitem__)
    engine.add_request("a", [0], SamplingParams(bad_words=["harbour"], max_tokens=3))
    engine.add_request("b", [0], SamplingParams(max_tokens=3))
    said = {o.request_id: o.outputs[0].token_ids for _ in range(3) for o in engine.step()}
    assert said == {"a": (1, 2, 1), "b": (6, 6, 3)}


OUTSIDE = [
    ({"logit_bias": {"100": 5}}, r"logit_bias.*\[0, 99\]"),
    ({"stop_token_ids": [103], "min_tokens": 2}, r"stop_token_ids.*\[0, 99\]"),
    ({"bad_words_ids": [[101]]}, r"bad_token_ids.*\[0, 99\]"),
    ({"bad_words_ids": [[1, 100]]}, r"bad_token_ids.*\[0, 99\]"),
    ({"allowed_token_ids": [99, 100]}, r"allowed_token_ids.*\[0, 99\]"),
]
NEVER = [
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {-1: 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words_ids": [[-1]]}, "bad_token_ids|bad_words_ids"),
]


@pytest.mark.parametrize("fields, words", NEVER)
def test_BN_03_what_is_no_id_anywhere_is_a_fault_at_once(fields, words):
    with pytest.raises(ParameterError, match=words):
        SamplingParams(**fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields, words", OUTSIDE)
def test_BN_03_ids_outside_the_logits_are_refused_before_the_batch(fields, words, backend):
    """The width of the logits decides, not the tokenizer's size; the neighbour's row keeps every bit."""
    rows = np.random.default_rng(3).standard_normal((2, 100)).astype(np.float32)
    before, bad, plain = rows.copy(), SamplingParams(**fields), SamplingParams()
    told = {"prompts": [[0], [0]], "outputs": [[], []], "end_token_ids": []}
    with pytest.raises(ParameterError, match=words):
        sample(rows, [plain, bad], backend=backend, **told)
    assert rows.tobytes() == before.tobytes()
    sampler = Sampler(num_slots=2, vocab_size=100, max_len=8, backend=backend)
    (slot,) = sampler.setup_step([Seat("plain", plain, [0], seed=0)])
    with pytest.raises(ParameterError, match=words):
        sampler.setup_step([Seat("bad", bad, [0], seed=0, end_token_ids=[])])
    assert sampler.slots.num_free == 1
    state = sampler.sample_async(sampler.step_of([slot]), rows[:1])
    assert state.host.token_ids.tolist() == [int(rows[0].argmax())]


def test_BN_03_a_running_neighbour_goes_on():
    def run(refuse):
        engine = Engine(ToyModel(vocab_size=100))
        engine.add_request("plain", [1, 2], SamplingParams(max_tokens=8))
        outputs = engine.step()
        for fields, words in OUTSIDE if refuse else ():
            with pytest.raises(ParameterError, match=words):
                engine.add_request("bad", [1], SamplingParams(**fields))
        return [*outputs, *(o for _ in range(8) for o in engine.step())][0].outputs[0].token_ids

    assert run(refuse=True) == run(refuse=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("words", [((-1,),), ((3, -1),), ((8,),), ((2**31,),), ((2,), ())])
def test_BN_03_bad_words_that_are_no_ids_take_no_seat(words, backend):
    """-1 would be the last id of the vocabulary, or somebody else's memory."""
    sampler = Sampler(num_slots=1, vocab_size=8, max_len=8, backend=backend)
    with pytest.raises(ParameterError, match="bad_word_ids"):
        sampler.setup_step([Seat("a", SamplingParams(bad_words="x"), [0], seed=0, bad_word_ids=words)])
    assert sampler.slots.num_free == 1
    assert bad_word_ids(["x"], lambda text: words[-1] or (8,), 8) == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_BN_03_a_large_bias_is_a_number_like_any_other(backend):
    """The bound of 100 belongs to a server's protocol; here every finite number is added as it is."""
    assert row_after(backend, [1.0] * 8, logit_bias={"5": 101}).tolist() == [1, 1, 1, 1, 1, 102, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "history, following", [([5, 6, 7, 5, 6], [7]), ([5, 6], []), ([5], []), ([], []), ([1, 1, 1], [1])]
)
def test_BN_06_an_ngram_of_the_rows_own_history_never_comes_again(history, following, backend):
    for cut in range(len(history) + 1):  # it may begin in the prompt
        assert banned(backend, 10, history[:cut], history[cut:], no_repeat_ngram_size=3) == following


@pytest.mark.parametrize("backend", BACKENDS)
def test_BN_06_size_1_and_neighbours_in_one_batch(backend):
    assert banned(backend, 10, [3], [4], no_repeat_ngram_size=1) == [3, 4]
    row = np.zeros(10, np.float32)
    row[[7, 8, 9]] = 3, 2, 1
    params = SamplingParams(no_repeat_ngram_size=3)
    outputs = [[5, 6, 7, 5, 6], [5, 6, 8, 5, 6], [5, 6, 7, 6, 5], [5, 6, 7, 5, 6, 8, 5, 6]]
    drawn = sample(np.tile(row, (4, 1)), params, prompts=[[1]] * 4, outputs=outputs, backend=backend)
    assert drawn.token_ids.tolist() == [8, 7, 7, 9]


def test_BN_06_generated_tokens_join_the_ngrams():
    """Rows that want 5, else 6, else 7, else the lowest id, for ever."""
    model = RowsModel([[0, 0, 0, 0, 0, 9, 8, 7]])
    for size, said in ((1, (5, 6, 7, 0)), (2, (5, 5, 6, 5, 7, 5)), (3, (5, 5, 5, 6, 5, 5, 7))):
        params = SamplingParams(no_repeat_ngram_size=size, max_tokens=len(said))
        assert LLM(model).generate([[1]], params)[0].outputs[0].token_ids == said
