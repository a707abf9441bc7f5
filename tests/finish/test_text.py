import pytest

from klero.errors import ModelError
from klero.finish import TextStream, TokenBytes, text_of_prompt
from klero.params import SamplingParams


def deltas_of(pieces, *, special=(), prompt=(), **fields):
    """Deltas token by token with the flush last, and the stop string."""
    vocabulary = TokenBytes.from_list([*prompt, *pieces], special=[len(prompt) + i for i in special])
    stream = TextStream(vocabulary, SamplingParams(**fields), range(len(prompt)))
    deltas = []
    for token_id in range(len(prompt), len(prompt) + len(pieces)):
        stop = stream.push(token_id)
        deltas.append(stream.delta())
        if stop is not None:
            break
    else:
        stop = None
        stream.finish()
        deltas.append(stream.delta())
    assert "".join(deltas) == stream.text
    return deltas, stop


@pytest.mark.parametrize(
    "stop, pieces, deltas, matched",
    [
        (["ab"], [b"a", b"b"], ["", ""], "ab"),
        (["ab"], [b"a", b"c"], ["", "ac", ""], None),
        (["ab"], [b"xa"], ["x", "a"], None),  # flushed at the end
        (["aab"], [b"aaa", b"b"], ["a", ""], "aab"),  # only the last two may still become it
        (["bcd", "c"], [b"abcd"], ["ab"], "c"),  # ends first
        (["c", "bc"], [b"abc"], ["a"], "bc"),  # end together: the longest
        (["abcx", "bcd"], [b"a", b"b", b"cd"], ["", "", "a"], "bcd"),
        (["b"], [b"abc"], ["a"], "b"),  # nothing after it, in its own token either
        (["€"], [b"a\xe2", b"\x82", b"\xacb"], ["a", "", ""], "€"),
        (["�"], [b"a\xff", b"b"], ["a"], "�"),
    ],
)
def test_stop_strings(stop, pieces, deltas, matched):
    assert deltas_of(pieces, stop=stop) == (deltas, matched)


def test_a_stop_string_that_is_kept_is_not_held_back():
    found = deltas_of([b"xa", b"bc"], stop=["ab"], include_stop_str_in_output=True)
    assert found == (["xa", "b"], "ab")


def test_nothing_comes_after_a_match():
    stream = TextStream(TokenBytes.from_list([b"ab\xe2", b"xa"]), SamplingParams(stop=["b", "ac"]))
    assert stream.push(0) == "b"
    stream.finish()
    assert stream.text == "a"


def test_a_token_that_was_dropped_leaves_the_text_before_it():
    fields = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    vocabulary = TokenBytes.from_list([b"<f>", b"\xe2", b"\x82\xac", b"a"], special={0})
    stream = TextStream(vocabulary, SamplingParams(**fields))
    stream.push(0)
    stream.push(1)
    stream.push(2, num_tail_tokens=1)
    stream.push(3, num_tail_tokens=2)
    assert stream.text == "<f>"
    stream.drop(2)
    stream.finish()
    assert stream.text == "<f> �"


def test_replacement_at_the_flush_is_no_match():
    assert deltas_of([b"a\xe2"], stop=["�"]) == (["a", "�"], None)


def test_hidden_special_tokens_stay_hidden_inside_a_kept_stop_string():
    pieces = [b"a", b"<f>", b"b"]
    assert deltas_of(pieces, special=[1], stop=["<f>b"], include_stop_str_in_output=True) == (
        ["a", "", "b"],
        "<f>b",
    )
    shown = deltas_of(
        pieces, special=[1], stop=["<f>b"], include_stop_str_in_output=True, skip_special_tokens=False
    )
    assert shown == (["a", "<f>", "b"], "<f>b")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({}, "abc"),
        ({"spaces_between_special_tokens": True}, "abc"),
        ({"skip_special_tokens": False}, "a<f><g>bc"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "a <f> <g> bc"),
    ],
)
def test_special_tokens(fields, text):
    deltas, _ = deltas_of([b"a", b"<f>", b"<g>", b"", b"b", b"c"], special=[1, 2], **fields)
    assert "".join(deltas) == text


def test_spaces_around_special_tokens_are_not_matched_but_go_with_their_character():
    fields = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    assert deltas_of([b"a", b"<f>", b"b"], special=[1], stop=["a<f>b"], **fields) == (["", "", ""], "a<f>b")
    assert deltas_of([b"a", b"<f>", b"b"], special=[1], stop=["<f>"], **fields) == (["a", ""], "<f>")
    assert deltas_of([b"a", b"<f>", b"b"], special=[1], stop=["a <f>"], **fields)[1] is None


def test_a_special_token_ends_an_unfinished_character():
    for skip, middle in ((True, ""), (False, "<f>")):
        deltas, _ = deltas_of([b"a\xe2", b"<f>", b"\xac"], special=[1], skip_special_tokens=skip)
        assert deltas == ["a", "�" + middle, "�", ""]


def test_without_detokenize_stop_strings_act_and_no_text_comes():
    assert deltas_of([b"a", b"b", b"c"], stop=["bc"], detokenize=False) == (["", "", ""], "bc")


@pytest.mark.parametrize(
    "pieces, deltas",
    [
        ([b"\xac", b"!"], ["€", "!", ""]),
        ([b"", b"\xac"], ["", "€", ""]),
        ([b"!"], ["!", ""]),  # not carried on: the half is the prompt's
        ([b"\x41\xac"], ["A�", ""]),
        ([b""], ["", ""]),
    ],
)
def test_half_a_character_at_the_end_of_the_prompt(pieces, deltas):
    assert deltas_of(pieces, prompt=[b"He", b"\xe2", b"\x82"]) == (deltas, None)


def test_a_half_of_the_prompt_that_stays_unfinished_is_replaced_once():
    assert deltas_of([b"\x98", b"!"], prompt=[b"\xf0\x9f"])[0] == ["", "�!", ""]


@pytest.mark.parametrize("prompt", [[b"He\xe2\x82"], [b"He"], [b"He\xff"], [b"\xf0\x9f"], []])
@pytest.mark.parametrize("output", [[b"\xac", b"!"], [b"!"], [b"\x98\x80"], [b""]])
def test_echoed_prompt_and_output_join_to_the_text_of_all_tokens(prompt, output):
    vocabulary = TokenBytes.from_list([*prompt, *output])
    params = SamplingParams(echo=True)
    deltas, _ = deltas_of(output, prompt=prompt, echo=True)
    text = text_of_prompt(vocabulary, params, range(len(prompt))) + "".join(deltas)
    assert text == b"".join([*prompt, *output]).decode(errors="replace")


def test_the_echoed_prompt_follows_the_rules_of_special_tokens_and_knows_no_stop():
    vocabulary = TokenBytes.from_list([b"<s>", b"ab", b"c"], special={0})
    assert text_of_prompt(vocabulary, SamplingParams(stop="b"), [0, 1, 0, 2]) == "abc"
    shown = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=True, echo=True)
    assert text_of_prompt(vocabulary, shown, [0, 1, 0]) == "<s> ab <s>"
    stream = TextStream(vocabulary, shown, [0, 1, 0])
    stream.push(2)
    assert stream.text == " c"


def test_a_special_token_at_the_end_of_the_prompt_leaves_no_half():
    vocabulary = TokenBytes.from_list([b"\xe2", b"<s>", b"\x82\xac"], special={1})
    stream = TextStream(vocabulary, SamplingParams(), [0, 1])
    stream.push(2)
    assert stream.text == "��"


def test_the_prompt_is_not_searched_for_stop_strings():
    assert deltas_of([b"b", b"ab"], prompt=[b"a"], stop=["ab"]) == (["b", ""], "ab")


def test_an_id_without_text_changes_nothing():
    stream = TextStream(TokenBytes.from_list([b"a\xe2", b"\x82\xac"]), SamplingParams(stop="ab"))
    stream.push(0)
    with pytest.raises(ModelError, match="token id 2 "):
        stream.push(2)
    stream.push(1)
    stream.finish()
    assert stream.text == "a€"


def test_a_special_token_parts_the_output_from_a_half_of_the_prompt():
    pieces = [b"<f>", b"\x82\xac"]
    assert deltas_of(pieces, special=[0], prompt=[b"\xe2"]) == (["", "��", ""], None)
