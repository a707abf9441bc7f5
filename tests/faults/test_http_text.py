"""Cases from the field, kinds utf8_stream and stop_finish, over HTTP: what a stream sends, and where it ends."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests.faults.served import CHAT, COMPLETIONS, END, ID, NUM_USER, OTHER_END, USER, ids, texts

FIN = ID[b"<|fin|>"]


@pytest.fixture(params=["completion", "chat"])
def ask(request, stage):
    """A function: script and fields in, the choice and its streamed texts out, on either route."""

    def asked(script, num_choices=1, **fields):
        chat = request.param == "chat"
        body = {"messages": USER} if chat else {"prompt": [0]}
        stage.says(script, NUM_USER if chat else 1)
        fields = {"temperature": 0, "max_tokens": 16, "n": num_choices, "return_token_ids": True, **fields}
        whole, chunks = stage.both({**body, **fields})
        for choice in whole["choices"]:
            choice["text"] = choice["message"]["content"] if chat else choice["text"]
            choice["usage"] = whole["usage"]
        return (*whole["choices"], *(texts(chunks, i) for i in range(num_choices)))

    return asked


def ends(choice):
    """Text, finish_reason and stop_reason."""
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


def test_U8_01_bytes_of_an_unfinished_character_wait_for_the_next_token(ask):
    choice, streamed = ask(ids(b"\x20\xf0\x9f", b"\x98\x80", b"\xc4", b"\x8f\x21"), max_tokens=4)
    assert streamed == [" ", "\U0001f600", "", "\u010f!"]
    assert choice["text"] == " \U0001f600\u010f!"


def test_U8_03_what_can_become_no_character_is_replaced_at_once(ask):
    # The second token is U+FFFD itself, the fourth a byte that no character has.
    choice, streamed = ask(ids(b"a", b"\xef\xbf\xbd", b"b", b"\xff", b" c"), max_tokens=5)
    assert streamed == ["a", "\ufffd", "b", "\ufffd", " c"]
    assert choice["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("echo, streamed", [(False, ["\u20ac", "!"]), (True, ["He\u20ac", "!"])])
def test_U8_04_half_a_character_at_the_end_of_the_prompt(stage, echo, streamed):
    stage.says(ids(b"\xac", b"!"), 2)
    body = {"prompt": ids(b"He", b"\xe2\x82"), "max_tokens": 2, "temperature": 0, "echo": echo}
    _, chunks = stage.both(body)
    assert texts(chunks) == streamed


def test_ST_01_no_part_of_a_stop_string_across_tokens_is_sent(ask):
    choice, streamed = ask(ids("al", "pha be", "ta gam", "ma"), stop=["beta"])
    assert streamed == ["al", "pha ", ""]
    assert ends(choice) == ("alpha ", "stop", "beta")
    assert choice["usage"]["completion_tokens"] == len(choice["token_ids"]) == 3


def test_ST_03_only_an_ambiguous_tail_waits_and_comes_out_at_the_end(ask):
    choice, streamed = ask(ids("Hello", " wor", "ld ST", "ART"), stop=["STOP!!"], max_tokens=4)
    assert streamed == ["Hello", " wor", "ld ", "START"]
    assert ends(choice) == ("Hello world START", "length", None)


@pytest.mark.parametrize("of", [{"prompt": [0]}, {"messages": USER}])
@pytest.mark.parametrize("stop", [[""], ["a", ""], ""])
def test_ST_04_an_empty_stop_string_is_refused(stage, of, stop):
    assert stage.refused({**of, "stop": stop})["param"] == "stop"


@pytest.mark.parametrize("stop, text", [(None, "wxyz"), ([], "wxyz"), ("x", "w"), (["x"], "w")])
def test_ST_04_no_stop_and_a_single_one_are_accepted(ask, stop, text):
    choice, _ = ask(ids("wxyz"), stop=stop, max_tokens=4)
    assert choice["text"] == text


def test_ST_06_stops_of_the_caller_leave_the_model_s_end_ids_on_for_every_choice(ask):
    one, other, *streamed = ask([*ids("ab"), OTHER_END, *ids("a")], num_choices=2, stop=["Result:"])
    for choice in (one, other):
        assert choice["token_ids"] == [*ids("ab"), OTHER_END]
        assert ends(choice) == ("ab", "stop", None)
    assert streamed == [["a", "b", ""]] * 2


ST_07 = [(ids("s"), 6, ("stop", *ids("s"))), ([], 7, ("length", None))]


@pytest.mark.parametrize("stop_token_ids, kept, reasons", ST_07)
def test_ST_07_ignore_eos_covers_all_end_ids_of_the_model_and_no_stop_id(ask, stop_token_ids, kept, reasons):
    (a,), (s,) = ids("a"), ids("s")
    script = [a, END, a, OTHER_END, a, s, a]
    choice, _ = ask(script, ignore_eos=True, stop_token_ids=stop_token_ids, max_tokens=7)
    assert choice["token_ids"] == script[:kept]
    assert (choice["finish_reason"], choice["stop_reason"]) == reasons


def test_ST_09_a_stop_string_sees_the_text_of_a_hidden_special_token(ask):
    choice, streamed = ask([*ids("ab"), FIN, *ids("aa")], stop=["<|fin|>"], skip_special_tokens=True)
    assert ends(choice) == ("ab", "stop", "<|fin|>")
    assert streamed == ["a", "b", ""]
    assert choice["usage"]["completion_tokens"] == 3


# Neighbours of these: the same faults, where nobody has reported them yet.

E_ACUTE = "\u00e9".encode()
WHERE_IT_ENDS = {
    "a stop string on the last permitted token": (ids("ab"), {"stop": "b", "max_tokens": 2}, ("a", "stop", "b")),
    "an end id on the last permitted token": ([*ids("a"), END], {"max_tokens": 2}, ("a", "stop", None)),
    "a stop id on the last permitted token": (
        ids("ab"), {"stop_token_ids": ids("b"), "max_tokens": 2}, ("a", "stop", *ids("b"))
    ),
    "a sequence of stop ids": (ids("abc"), {"stop_token_ids": [ids("bc")]}, ("a", "stop", ids("bc"))),
    "what may begin a sequence, and does not": (
        ids("abx"), {"stop_token_ids": [ids("bc")], "max_tokens": 3}, ("abx", "length", None)
    ),
    "a stop string kept": (
        ids("al", "pha be", "ta gam"), {"stop": "beta", "include_stop_str_in_output": True},
        ("alpha beta", "stop", "beta"),
    ),
    "a stop id kept": (
        ids("ab"), {"stop_token_ids": ids("b"), "include_stop_str_in_output": True}, ("ab", "stop", *ids("b"))
    ),
    "held to the end": ([*ids("ab"), END], {"stop": "bc"}, ("ab", "stop", None)),
    "half of it at the end, and an end id": ([*ids("ab", "b"), END], {"stop": "bbb"}, ("abb", "stop", None)),
    "the bytes of a character of it apart": (
        ids(b"a", E_ACUTE[:1], E_ACUTE[1:]), {"stop": "\u00e9"}, ("a", "stop", "\u00e9")
    ),
    "its characters beyond 16 bits": (
        ids(b"a", b"\xf0\x9f", b"\x98\x80", b"b"), {"stop": "\U0001f600b"}, ("a", "stop", "\U0001f600b")
    ),
    "the first byte of it and another character": (
        ids(b"a", E_ACUTE[:1], b"b"), {"stop": "\u00e9", "max_tokens": 3}, ("a\ufffdb", "length", None)
    ),
    "the one that ends first": (ids("abcd"), {"stop": ["bcd", "bc", "c"]}, ("a", "stop", "bc")),
    "one that is in the prompt": (ids("xyz"), {"stop": ["Hi", "z"]}, ("xy", "stop", "z")),
    "a line break": (ids("a\n\nb"), {"stop": ["\n\n"]}, ("a", "stop", "\n\n")),
    "before the least length": (
        ids("a\nbcd\ne"), {"stop": ["\n"], "min_tokens": 4, "max_tokens": 7}, ("a\nbcd", "stop", "\n")
    ),
    "special tokens shown": (
        [*ids("a"), FIN, *ids("b"), END], {"skip_special_tokens": False}, ("a<|fin|>b", "stop", None)
    ),
    "special tokens hidden": ([*ids("a"), FIN, *ids("b"), END], {}, ("ab", "stop", None)),
    "no text wanted, and a stop string": (ids("ab"), {"stop": "b", "detokenize": False}, ("", "stop", "b")),
    "an end at once": ([END], {}, ("", "stop", None)),
    "a stop string at once": (ids("ab"), {"stop": "a"}, ("", "stop", "a")),
}  # fmt: skip


@pytest.mark.parametrize("name", WHERE_IT_ENDS)
def test_where_a_text_ends(ask, name):
    script, fields, right = WHERE_IT_ENDS[name]
    choice, streamed = ask(script, **fields)
    assert ends(choice) == right
    assert len(streamed) == len(choice["token_ids"])  # one delta for each step


def test_a_stop_string_is_not_looked_for_across_the_end_of_the_prompt(stage):
    stage.says([*ids("OP!!", "x"), END], len("a ST"))
    body = {"prompt": "a ST", "echo": True, "stop": "STOP!!", "temperature": 0, "max_tokens": 4}
    (choice,) = stage.both(body)[0]["choices"]
    assert ends(choice) == ("a STOP!!x", "stop", None)


AWKWARD = 'a\u2028b\u2029c\u0085d\r\ne\rf\n\ndata: [DONE]\n\n: \x00\ufeff"\\</script>\x7f\U0001f600'


def test_characters_that_some_clients_take_for_ends_of_lines(ask):
    choice, _ = ask([*ids(AWKWARD), END], max_tokens=100)
    assert choice["text"] == AWKWARD


@pytest.mark.parametrize("path, body", [(COMPLETIONS, {"prompt": [0]}), (CHAT, {"messages": USER})])
def test_every_event_is_one_line_for_clients_that_split_at_any_line_end(stage, path, body):
    """U+0085, U+2028 and U+2029 end lines for str.splitlines, and so for `iter_lines` of common clients."""
    stage.says([*ids(AWKWARD), END], NUM_USER if path == CHAT else 1)
    body = {**body, "temperature": 0, "max_tokens": 100, "stream": True, "echo": True, "request_id": "\u2028"}
    body = body if path == COMPLETIONS else {name: value for name, value in body.items() if name != "echo"}
    with stage.http.stream("POST", stage.url + path, json=body) as answer:
        lines = list(answer.iter_lines())
    assert all(not line or line.startswith("data: ") for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("prompt", ["a\ufffdb", "\ufeffx", "\U0001f600 \u00e9", "<end>", " ", "\n", "\x00", "\u2028"])
def test_a_prompt_comes_back_as_it_was(stage, prompt):
    stage.says([*ids("!"), END], len(ids(prompt)))
    body = {"prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 1, "skip_special_tokens": False, "n": 2}
    for choice in stage.both({**body, "seed": 0})[0]["choices"]:
        assert choice["text"] == prompt + "!"
