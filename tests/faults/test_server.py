"""Cases from the field, kind server, and those of other kinds that a server can get wrong by itself.

ST-10 and LP-04 are about accepted runs of drafts. No body can ask for a draft, so that they have no test over HTTP.
"""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests.faults.served import CHAT, COMPLETIONS, END, OTHER_END, USER, WIDTH, Quick, ids
from tests.server.live import OPTIONS, make_tokenizer

from klero import SamplingParams
from klero.engine import LLM
from klero.testing.models import PagedToyModel

A, B, C = ids("abc")
BOTH = pytest.mark.parametrize("of", [{"prompt": [1, 2]}, {"messages": USER}], ids=["completion", "chat"])


def alone(prompt, **fields):
    """The choices of a request that no server sees."""
    llm = LLM(PagedToyModel(vocab_size=WIDTH, end_token_ids=(END, OTHER_END)))
    params = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, **fields})
    return [(choice.token_ids, choice.finish_reason) for choice in llm.generate([prompt], params)[0].outputs]


def told(choices):
    """The same of choices of an answer."""
    return [(tuple(choice["token_ids"]), choice["finish_reason"]) for choice in choices]


@BOTH
@pytest.mark.parametrize("options, wanted", [(None, False), ({}, False), ({"include_usage": True}, True)])
def test_SV_01_usage_comes_once_at_the_end_and_only_when_asked_for(stage, of, options, wanted):
    path = CHAT if "messages" in of else COMPLETIONS
    *chunks, done = stage.events(path, {**of, "max_tokens": 3, "ignore_eos": True, "stream_options": options})
    assert done == "[DONE]"
    if wanted:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3
    assert [chunk.get("usage", "none") for chunk in chunks] == [None if wanted else "none"] * 3
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


@BOTH
def test_SV_01_stream_options_need_a_stream(stage, of):
    for stream in ({}, {"stream": False}, {"stream": None}):
        path = CHAT if "messages" in of else COMPLETIONS
        answer = stage.post(path, {**of, **stream, "stream_options": {"include_usage": True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


SV_03 = {"prompt": [5], "n": 3, "seed": 192, "max_tokens": 20, "return_token_ids": True}


def test_SV_03_every_choice_comes_to_its_own_end(stage):
    """The choices have two, five and three tokens."""
    stage.rows([{A: 0, B: 0, END: 0}])
    whole, chunks = stage.both(SV_03)
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [2, 5, 3]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    reasons = [(part["index"], part["finish_reason"]) for part in parts if part["finish_reason"] is not None]
    assert reasons == [(0, "stop"), (2, "stop"), (1, "stop")]
    assert parts[-1]["finish_reason"] == "stop"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (1, 10)


def test_SV_03_a_client_that_leaves_frees_every_choice(stage):
    stage.rows([{A: 0, B: 0}])
    gate, before = stage.close_gate(), len(stage.model.seen)
    body = {**SV_03, "stream": True, "max_tokens": 200}
    with stage.http.stream("POST", stage.url + COMPLETIONS, json=body) as answer:
        for number in (1, 2):
            stage.wait_for_steps(before + number)
            gate.release()
        stage.wait_for_steps(before + 3)
        assert answer.status_code == 200
    stage.wait_for_running(0)
    gate.release()
    stage.all_free()
    assert stage.model.seen[before:] == [3, 3, 3]  # nothing after the step that ran


def test_SV_04_two_requests_of_one_name_are_two_requests(stage):
    gate, before, answers = stage.close_gate(), len(stage.model.seen), {}

    def ask(i):
        body = {"prompt": [i], "max_tokens": 8, "seed": i, "request_id": "same", "return_token_ids": True}
        answers[i] = stage.complete(**body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in (1, 2)]
    asked = stage.aio.num_asked
    for thread in threads:
        thread.start()
    stage.wait_until_asked(asked + 2)
    gate.release(100)
    for thread in threads:
        thread.join(10)
    assert len(stage.model.seen) < before + 16  # they ran together
    assert [told(answers[i]["choices"]) for i in (1, 2)] == [alone([i], max_tokens=8, seed=i) for i in (1, 2)]
    assert answers[1]["id"] != answers[2]["id"]
    assert answers[1]["request_id"] == answers[2]["request_id"] == "same"


def test_SV_04_a_name_may_be_used_again_before_its_request_has_ended(stage):
    body = {"prompt": [1], "max_tokens": 8, "seed": 1, "request_id": "same", "return_token_ids": True}
    gate, before, answers = stage.close_gate(), len(stage.model.seen), []
    with stage.http.stream("POST", stage.url + COMPLETIONS, json={**body, "stream": True}) as answer:
        stage.wait_for_steps(before + 1)
        assert answer.status_code == 200
    asked = stage.aio.num_asked
    thread = threading.Thread(target=lambda: answers.append(stage.complete(**body)))
    thread.start()
    stage.wait_until_asked(asked + 1)
    gate.release(100)
    thread.join(10)
    assert told(answers[0]["choices"]) == alone([1], max_tokens=8, seed=1)


SV_06 = [[WIDTH], [123456], [-1], [[3, -1]], [1.5], [True], [2**63], [[3], [WIDTH]], [[3, "x"]], [None]]


@pytest.mark.parametrize("prompt", SV_06)
def test_SV_06_what_is_no_token_is_refused(stage, prompt):
    assert stage.refused({"prompt": prompt})["param"].startswith("prompt")
    assert stage.complete(prompt=[WIDTH - 1], max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.fixture(scope="module")
def narrow():
    """A server with a context of 16; the prompt of a conversation is its texts."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    model = PagedToyModel(vocab_size=257, max_model_len=16)
    with Quick(lambda: LLM(model, tokenizer=tokenizer, **OPTIONS)) as live:
        yield live
        live.all_free()


SV_07 = [
    (8, 8, 8), (8, 9, ("16", "8", "9")), (8, None, 8), (15, None, 1), (16, None, ("16",)), (17, None, ("16", "17")),
    (8, -1, ("max_tokens=-1",)), (3, None, 13), (15, 1, 1), (15, 2, ("16", "15", "2")),
]  # fmt: skip


@pytest.mark.parametrize("num_prompt, max_tokens, right", SV_07)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_SV_07_prompt_and_answer_fit_together(narrow, path, num_prompt, max_tokens, right):
    body = {"prompt": [5] * num_prompt}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "x" * num_prompt}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    answer = narrow.post(path, body)
    if isinstance(right, int):
        assert answer.json()["usage"]["completion_tokens"] == right
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert answer.status_code == 400
        assert all(words in answer.json()["error"]["message"] for words in right)


def test_SV_09_the_ids_are_those_that_were_drawn(stage):
    """The text "water" would be one token; it was two, and an end."""
    drawn = [*ids("wa", "ter"), END]
    assert stage.post("/tokenize", {"prompt": "water"}).json()["tokens"] == ids("water")
    stage.says(drawn, 2)
    body = {"prompt": "wa" + "!", "temperature": 0, "return_token_ids": True, "logprobs": 0}
    (choice,) = stage.both(body)[0]["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("water", drawn, ids("wa", "!"))
    assert {len(values) for values in choice["logprobs"].values()} == {3}


def test_SD_03_choices_of_one_seed_differ_and_repeat(stage):
    def texts(**fields):
        body = {"prompt": [1], "n": 3, "seed": 11, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        return [choice["token_ids"] for choice in stage.complete(**{**body, **fields})["choices"]]

    assert len({tuple(one) for one in texts()}) == 3
    assert texts() == texts()
    assert texts(n=1) == texts()[:1]
    assert len({tuple(one) for one in texts(temperature=0)}) == 1


@BOTH
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "7", True, [7], {}])
def test_SD_06_what_is_no_seed_is_refused(stage, of, seed):
    assert stage.refused({**of, "seed": seed})["param"] == "seed"


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_SD_06_every_64_bit_seed_is_a_seed_and_said(stage, seed):
    """-1 is a seed, not "unset", and 0 is one too; the answer says it as one can give it again."""
    body = {"prompt": [1], "max_tokens": 8, "return_token_ids": True}
    (first,), (again,) = (stage.complete(**body, seed=one)["choices"] for one in (seed, seed % 2**64))
    assert first == again
    assert first["seed"] == seed % 2**64
    assert told([first]) == alone([1], max_tokens=8, seed=seed)


def test_SD_07_requests_without_a_seed_differ_and_say_theirs(stage):
    body = {"prompt": [1], "max_tokens": 16, "temperature": 1.5, "top_p": 0.95, "top_k": 500, "ignore_eos": True}
    first, second = (stage.complete(**body, **seed)["choices"][0] for seed in ({}, {"seed": None}))
    assert first["seed"] != second["seed"]
    assert first["text"] != second["text"]
    assert stage.complete(**body, seed=first["seed"])["choices"][0] == first


@pytest.mark.parametrize("temperature", [0.001, 0.0001, 1e-05, 1e-06, 1e-12, 5e-324, 0.0])
def test_SM_01_tiny_temperatures_are_numbers(stage, temperature):
    stage.rows([dict(zip(range(4), [3.25, 4.5, 12.75, -1.5], strict=True))])
    body = {"prompt": [1], "temperature": temperature, "max_tokens": 3, "return_receipts": True}
    (choice,) = stage.both(body)[0]["choices"]
    assert [receipt["token_id"] for receipt in choice["receipts"]] == [2, 2, 2]
    assert [receipt["processed"] for receipt in choice["receipts"]] == [0.0] * 3


@BOTH
def test_SM_02_a_top_p_of_nothing_keeps_the_likeliest(stage, of):
    stage.rows([{A: 1, B: 3, C: 2}])
    for top_p in (0, 0.0, 1e-12, 0.001):
        (choice,) = stage.both({**of, "top_p": top_p, "max_tokens": 1, "return_receipts": True})[0]["choices"]
        assert (choice["receipts"][0]["token_id"], choice["receipts"][0]["num_kept"]) == (B, 1)


SM_04 = [({"top_k": 5_000_000}, 128), ({"top_k": 0}, 128), ({"top_k": -1}, 128), ({"top_k": 64}, 64), ({"top_k": 1}, 1),
         ({"temperature": 0.0, "top_k": 0}, 1), ({"top_k": 128}, 128)]  # fmt: skip


def test_SM_04_a_top_k_of_any_size(stage):
    stage.rows([dict.fromkeys(range(128), 0)])
    for fields, kept in SM_04:
        answer = stage.complete(prompt=[1], max_tokens=1, return_receipts=True, **fields)
        assert answer["choices"][0]["receipts"][0]["num_kept"] == kept


@BOTH
@pytest.mark.parametrize("top_k", [2.5, -2, True, "5"])
def test_SM_04_what_is_no_top_k_is_refused(stage, of, top_k):
    assert stage.refused({**of, "top_k": top_k})["param"] == "top_k"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_SM_10_what_allows_nothing_is_told(stage, temperature):
    bans = {"temperature": temperature, "allowed_token_ids": [4], "bad_words_ids": [[4]]}
    assert "allows nothing" in stage.refused({"prompt": [1], **bans})["message"]
    later = {"prompt": [1], "temperature": temperature, "allowed_token_ids": [4, 5], "bad_words_ids": [[4, 5], [4, 4]],
             "logit_bias": {"4": 100}, "return_token_ids": True, "seed": 0}  # fmt: skip
    answer = stage.post(COMPLETIONS, later)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "server_error")
    assert "no token is left for position 2 after the bans of allowed_token_ids, bad_token_ids" in error["message"]
    first, last = stage.events(COMPLETIONS, later)
    assert first["choices"][0]["token_ids"] == [4]
    assert last == {"error": error}
    assert stage.post(COMPLETIONS, {**later, "prompt": [[1], [2]], "n": 2}).json()["error"] == error


BN_03 = {
    "logit_bias": [
        {str(WIDTH): 5}, {"-1": 5}, {"abc": 1}, {"5": 101}, {"5": -101}, [[5, 1]],
        *({"5": value} for value in (True, "1", None, [1])),
        *({key: 1} for key in (" 5", "+5", "5 ", "5.0", "1_0", "\u0665", "0x5", "", "9" * 5000)),
    ],
    "stop_token_ids": [[WIDTH], [-1], [[]], [1.0], [[1, WIDTH]]], "end_token_ids": [[WIDTH], -1],
    "bad_words_ids": [[[WIDTH + 1]], [[]], [WIDTH]], "allowed_token_ids": [[WIDTH - 1, WIDTH], [], [-1], [True]],
    "logprob_token_ids": [[-1], [WIDTH]], "embedding_bias": [[0.0] * 3, [], ["x"] * WIDTH],
}  # fmt: skip


@pytest.mark.parametrize("name", BN_03)
def test_BN_03_what_is_no_id_is_refused_before_the_batch(stage, name):
    for value in BN_03[name]:
        for of in ({"prompt": [1]}, {"messages": USER}):
            assert stage.refused({**of, name: value})["param"] == name


def test_BN_10_min_tokens_yields_to_the_end_of_a_grammar(stage):
    (yes,) = ids("yes")
    stage.rows([{yes: 7, END: 8, A: 9}])
    body = {"prompt": [1], "temperature": 0, "choice": ["yes"], "min_tokens": 8, "return_token_ids": True}
    (choice,) = stage.both({**body, "max_tokens": 20})[0]["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("yes", "stop", [yes, END])


GR_09 = [{"enum": []}, {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]}, {"type": "strnig"},
         {"type": "integer", "minimum": 5, "maximum": 4}, {"$ref": "#/$defs/none"}, {"type": 5}, False]  # fmt: skip


@BOTH
@pytest.mark.parametrize("number", range(len(GR_09)))
def test_GR_09_a_schema_that_nothing_satisfies_is_refused_whole_and_streamed(stage, of, number):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": GR_09[number], "strict": True}}
    assert stage.refused({**of, "response_format": form, "max_tokens": 5})["param"] == "response_format"
    assert stage.refused({**of, "json": GR_09[number], "max_tokens": 5})["param"] == "json"


@BOTH
def test_IB_03_every_request_keeps_its_own_parameters(stage, of):
    """Three at once, one greedy, one drawn, one with a top_k of 1."""
    fields = [{"max_tokens": 1, "temperature": 0.0}, {"max_tokens": 3, "seed": 3}, {"max_tokens": 2, "top_k": 1}]
    path, answers = CHAT if "messages" in of else COMPLETIONS, {}
    bodies = [{**of, **own, "ignore_eos": True, "return_token_ids": True} for own in fields]
    one_by_one = [stage.post(path, body).json()["choices"] for body in bodies]

    def ask(i):
        answers[i] = stage.post(path, bodies[i]).json()["choices"]

    gate, asked = stage.close_gate(), stage.aio.num_asked
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    stage.wait_until_asked(asked + 3)
    gate.release(100)
    for thread in threads:
        thread.join(10)
    assert [told(answers[i]) for i in range(3)] == [told(choices) for choices in one_by_one]
    assert [len(answers[i][0]["token_ids"]) for i in range(3)] == [1, 3, 2]
