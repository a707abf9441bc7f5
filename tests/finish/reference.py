"""The definition of finish and text, on whole sequences: slow, no state, nothing incremental."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from klero.finish import Finished, FinishReason, TokenBytes
from klero.params import SamplingParams


@cache
def is_half(tail: bytes) -> bool:
    """Whether `tail` begins some character of UTF-8 and lacks its rest, by trying rests."""
    for num_more in range(3):
        for middle in range(0x80, 0xC0):
            try:
                if len((tail + bytes([middle]) + b"\x80" * num_more).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


def half_of(data: bytes) -> bytes:
    """The unfinished character at the end of `data`."""
    return next((data[-n:] for n in (3, 2, 1) if len(data) >= n and is_half(data[-n:])), b"")


def characters(
    vocabulary: TokenBytes, ids: Sequence[int], skip: bool, *, ended: bool
) -> list[tuple[str, str]]:
    """(matched, shown) of every character of the tokens; with `ended` the unfinished one too, as U+FFFD."""
    found: list[tuple[str, str]] = []
    run = b""
    for token_id in ids:
        data = vocabulary.bytes_of_token(token_id)
        if vocabulary.is_special(token_id):
            found += [(c, c) for c in run.decode(errors="replace")]
            found += [(c, "" if skip else c) for c in data.decode(errors="replace")]
            run = b""
        else:
            run += data
    if not ended:
        run = run[: len(run) - len(half_of(run))]
    return found + [(c, c) for c in run.decode(errors="replace")]


def open_tail(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of `text` that is a proper prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def first_match(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the first match that ends after `start`; the longest of those that end there."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def expected(
    vocabulary: TokenBytes,
    params: SamplingParams,
    end_ids: Sequence[int],
    max_tokens: int,
    ids: Sequence[int],
) -> tuple[int, Finished | None, str]:
    """(tokens kept, why it ended, whole text) of a run in which `ids` come one after the other."""

    def shown(num_tokens: int) -> str:
        return "".join(s for _, s in characters(vocabulary, ids[:num_tokens], skip, ended=True))

    skip, keep = params.skip_special_tokens, params.include_stop_str_in_output
    ends = {*params.end_token_ids, *(() if params.ignore_eos else end_ids)}
    for num in range(1, len(ids) + 1):
        may_stop_at_ids = num - 1 >= params.min_tokens
        if may_stop_at_ids and ids[num - 1] in ends:
            return num, Finished(FinishReason.STOP), shown(num if keep else num - 1)
        fits = [s for s in params.stop_token_ids if tuple(ids[max(0, num - len(s)) : num]) == s]
        if may_stop_at_ids and fits:
            best = max(fits, key=len)
            reason = best if len(best) > 1 else best[0]
            return num, Finished(FinishReason.STOP, reason), shown(num if keep else num - len(best))
        before = characters(vocabulary, ids[: num - 1], skip, ended=False)
        now = characters(vocabulary, ids[:num], skip, ended=False)
        match = first_match("".join(c for c, _ in now), len(before), params.stop)
        if match and num >= params.min_tokens:
            end, stop = match
            text = "".join(s for _, s in now[: end if keep else end - len(stop)])
            return num, Finished(FinishReason.STOP, stop), text
        if num == max_tokens:
            return num, Finished(FinishReason.LENGTH), shown(num)
    return len(ids), None, shown(len(ids))
