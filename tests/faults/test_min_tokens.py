"""Cases from the field, kind min_tokens: what may end a sequence before it has its least length."""

from klero.finish import Finish, Finished, FinishReason, TokenBytes
from klero.params import SamplingParams


def test_BN_09_a_stop_string_before_min_tokens_is_text_and_never_fires_later():
    vocabulary = TokenBytes.from_list([b"a", b"\n", b"b", b"c", b"d", b"e"])
    params = SamplingParams(stop="\n", min_tokens=4, max_tokens=7)
    finish = Finish(params, end_token_ids=(), vocabulary=vocabulary, max_tokens=7)
    assert finish.push_all([0, 1, 2, 3, 4, 1, 5]) == 6
    assert finish.finished == Finished(FinishReason.STOP, "\n")
    assert finish.text == "a\nbcd"
