import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from klero.errors import ModelError
from klero.finish import TokenBytes
from klero.finish.pieces import bytes_of_piece_function


def tokenizer_of(pieces, decoder, added=()):
    """A tokenizer that has these vocabulary entries and cannot encode."""
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        made.decoder = decoder
    for token in added:
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    return made


def sentence_piece():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


@pytest.mark.parametrize(
    "decoder, piece, data",
    [
        (decoders.ByteLevel(), "Ġhello", b" hello"),
        (decoders.ByteLevel(), "âĤ", b"\xe2\x82"),
        (decoders.ByteLevel(), "Ċ", b"\n"),
        (decoders.ByteLevel(), "日", "日".encode()),  # outside the byte alphabet: plain text
        (decoders.Sequence([decoders.ByteLevel()]), "Ġa", b" a"),
        (sentence_piece(), "▁hello", b" hello"),
        (sentence_piece(), "<0xE2>", b"\xe2"),
        (sentence_piece(), "<0xe2>x", b"<0xe2>x"),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            "▁▁",
            b"  ",
        ),
        (decoders.Metaspace(), "▁hello", b" hello"),
        (decoders.Metaspace(), "é", "é".encode()),
        (decoders.WordPiece(), "hello", b" hello"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (decoders.WordPiece(), ".", b"."),
        (None, "hello", b" hello"),
    ],
)
def test_an_entry_is_read_as_a_continuation(decoder, piece, data):
    vocabulary = TokenBytes(tokenizer_of(["?", piece], decoder))
    assert vocabulary.bytes_of_token(1) == data
    assert vocabulary.bytes_of_token(1) == data  # from what was kept
    assert not vocabulary.is_special(1)


def test_every_byte_has_one_letter_in_the_byte_level_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    read = bytes_of_piece_function(decoders.ByteLevel())
    assert sorted(read(letter) for letter in ByteLevel.alphabet()) == [bytes([b]) for b in range(256)]


def test_added_tokens_stand_for_their_content():
    added = [AddedToken("<|é|>", special=True), AddedToken("  ", special=False)]
    vocabulary = TokenBytes(tokenizer_of(["a", "Ġb"], decoders.ByteLevel(), added))
    assert vocabulary.bytes_of_token(2) == "<|é|>".encode()
    assert vocabulary.is_special(2)
    assert vocabulary.bytes_of_token(3) == b"  "
    assert not vocabulary.is_special(3)


def test_text_is_what_the_tokenizer_itself_decodes():
    pieces = ["?", "▁Gr", "üß", "e", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁z", "!"]
    tokenizer = tokenizer_of(pieces, sentence_piece())
    vocabulary = TokenBytes(tokenizer)
    ids = list(range(1, len(pieces)))
    text = b"".join(vocabulary.bytes_of_token(i) for i in ids).decode()
    assert text == " Grüße 😀 z!"
    assert text.removeprefix(" ") == tokenizer.decode(ids)


def test_a_transformers_tokenizer_is_read_through_its_backend():
    from transformers import PreTrainedTokenizerFast

    inner = tokenizer_of(["a", "Ġb"], decoders.ByteLevel(), [AddedToken("<end>", special=True)])
    vocabulary = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert [vocabulary.bytes_of_token(i) for i in range(3)] == [b"a", b" b", b"<end>"]
    assert vocabulary.is_special(2)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
    ],
)
def test_a_decoder_whose_entries_have_no_text_of_their_own_is_an_error(decoder):
    with pytest.raises(ModelError, match=r"TokenBytes\.from_list"):
        TokenBytes(tokenizer_of(["?", "a"], decoder))


def test_a_decoder_written_in_python_is_an_error():
    class Shouting:
        def decode_chain(self, pieces):
            return [piece.upper() for piece in pieces]

    with pytest.raises(ModelError, match="hides its settings"):
        TokenBytes(tokenizer_of(["?", "a"], decoders.Decoder.custom(Shouting())))


def test_a_slow_tokenizer_is_an_error():
    with pytest.raises(ModelError, match="object is not a fast tokenizer"):
        TokenBytes(object())


@pytest.mark.parametrize("token_id", [2, 10**6, -1])
def test_an_id_without_text_is_an_error(token_id):
    for vocabulary in (TokenBytes.from_list([b"a", b"b"]), TokenBytes(tokenizer_of(["a", "b"], None))):
        with pytest.raises(ModelError, match=f"token id {token_id} "):
            vocabulary.bytes_of_token(token_id)


def test_a_list_of_bytes_is_a_vocabulary():
    vocabulary = TokenBytes.from_list([b"a", b"\xe2", b"<s>"], special={2})
    assert vocabulary.bytes_of_token(1) == b"\xe2"
    assert [vocabulary.is_special(i) for i in range(3)] == [False, False, True]
    with pytest.raises(ModelError, match=r"special=\[3\]"):
        TokenBytes.from_list([b"a", b"b", b"c"], special={0, 3})
