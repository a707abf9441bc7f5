"""What holds for every byte stream and every set of stops, against the definition in reference.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.finish.reference import characters, expected, open_tail

from klero.finish import Finish, TextStream, TokenBytes
from klero.params import SamplingParams
from klero.rewrite.bans.reference import min_tokens_words, suffixes

PIECES = (
    b"a",
    b"b",
    b"ab",
    b"",
    "€".encode(),
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\x82\xac",
    b"\xf0\x9f",
    b"\xed\xa0",
    b"\xff",
)
SPECIAL = (b"<a>", b"b")
BYTES = (*PIECES, *SPECIAL)
NUM_PLAIN, NUM_ALL = len(PIECES), len(BYTES)
VOCABULARY = TokenBytes.from_list(BYTES, special=range(NUM_PLAIN, NUM_ALL))

plain_ids = st.lists(st.integers(0, NUM_PLAIN - 1), max_size=16)
any_ids = st.lists(st.integers(0, NUM_ALL - 1), max_size=16)
stop_strings = st.lists(st.text("ab€�<>", min_size=1, max_size=4), max_size=3)
sequences = st.lists(st.lists(st.integers(0, NUM_ALL - 1), min_size=1, max_size=3), max_size=3)


def params_of(stop, **fields):
    return SamplingParams(stop=stop, **fields)


@given(
    any_ids,
    stop_strings,
    sequences,
    st.lists(st.integers(0, NUM_ALL - 1), max_size=1),
    st.integers(0, 6),
    st.integers(1, 16),
    st.tuples(*[st.booleans()] * 4),
)
def test_finish_is_its_definition_and_deltas_join_to_the_text(ids, stop, stop_ids, ends, low, high, flags):
    keep, skip, ignore, own = flags
    params = SamplingParams(
        stop=stop,
        stop_token_ids=stop_ids,
        end_token_ids=ends if own else (),
        min_tokens=min(low, high),
        include_stop_str_in_output=keep,
        skip_special_tokens=skip,
        ignore_eos=ignore,
    )
    num_kept, finished, text = expected(VOCABULARY, params, ends, high, ids)
    finish = Finish(params, end_token_ids=ends, vocabulary=VOCABULARY, max_tokens=high)
    joined = ""
    for num, token_id in enumerate(ids, start=1):
        short = num - 1 < params.min_tokens
        banned = suffixes(min_tokens_words(params, ends), np.int32(ids[: num - 1])) if short else ()
        end = finish.push(token_id)
        joined += finish.delta()
        assert text.startswith(joined)  # nothing that would have to be taken back was sent
        if end is not None:
            assert num == num_kept
            assert end.reason == "length" or isinstance(end.stop_reason, str) or token_id not in banned
            break
    assert finish.finished == finished
    assert finish.num_tokens == num_kept
    if finished is None:
        finish.end("abort")
        joined += finish.delta()
    assert joined == finish.text == text


@given(any_ids, stop_strings, st.booleans(), st.booleans())
def test_exactly_the_open_tail_is_held(ids, stop, skip, keep):
    stream = TextStream(
        VOCABULARY, params_of(stop, skip_special_tokens=skip, include_stop_str_in_output=keep)
    )
    for num, token_id in enumerate(ids, start=1):
        if stream.push(token_id) is not None:
            break
        seen = characters(VOCABULARY, ids[:num], skip, ended=False)
        num_open = 0 if keep else open_tail("".join(c for c, _ in seen), stop)
        assert stream.text == "".join(s for _, s in seen[: len(seen) - num_open])


@given(plain_ids, stop_strings, st.booleans(), st.data())
def test_other_token_borders_give_the_same_text(ids, stop, keep, data):
    whole = b"".join(BYTES[i] for i in ids)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    params = params_of(stop, include_stop_str_in_output=keep)
    texts = []
    for vocabulary, tokens in ((VOCABULARY, ids), (TokenBytes.from_list(pieces), range(len(pieces)))):
        stream = TextStream(vocabulary, params)
        for token_id in tokens:
            if stream.push(token_id) is not None:
                break
        else:
            stream.finish()
        texts.append(stream.text)
    assert texts[0] == texts[1]


@given(any_ids, any_ids, st.booleans())
def test_a_prompt_adds_nothing_but_the_start_of_its_last_character(prompt, ids, echo):
    stream = TextStream(VOCABULARY, SamplingParams(echo=echo), prompt)
    for token_id in ids:
        stream.push(token_id)
    stream.finish()
    alone = "".join(s for _, s in characters(VOCABULARY, ids, True, ended=True))
    if stream.text != alone:
        before = "".join(s for _, s in characters(VOCABULARY, prompt, True, ended=False))
        assert before + stream.text == "".join(
            s for _, s in characters(VOCABULARY, [*prompt, *ids], True, ended=True)
        )


@pytest.mark.parametrize("num_tokens", [20_000])
def test_a_long_text_takes_linear_time_per_token(num_tokens):
    params = SamplingParams(stop=["a" * 500 + "b"])
    finish = Finish(params, end_token_ids=(), vocabulary=VOCABULARY, max_tokens=num_tokens)
    assert finish.push_all([0] * num_tokens) == num_tokens
    assert finish.text == "a" * num_tokens
