"""Patterns of a schema, which are those of ECMA 262, in the words of Rust's regex; and formats as patterns."""

from __future__ import annotations

import re
from typing import Any

PIECE = re.compile(
    r"\\[pP]\{[^}]*\}|\\[xu]\{[^}]*\}|\\x..|\\u....|\\.|\[(?:\\.|[^\]\\])*\]|\{[0-9]+(?:,[0-9]*)?\}|.", re.DOTALL
)
"""What a pattern is made of: escapes, sets, counts, and single characters."""
CATEGORY = re.compile(r"\\[pP](?:[LMNPSZ]|\{[LMNPSZ][a-z]?\})")
COUNT = re.compile(r"[*+?]|\{[0-9].*\}", re.DOTALL)
LETTERS = "dDwWsSnrtfvxupP"
"""The letters whose escapes mean something to ECMA 262, and the same to Rust's regex or to _written. Others are
letters to the one and anchors to the other."""
NOTHING = re.compile(r"(?:(?<=[(|:>])|^)(?=[)|])|(?<=\|)$|\(\?[a-zA-Z-]+\)")
SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
OTHER_SPACES = r"\x1c-\x1f\x85\ufeff"
"""What \\s means to ECMA 262 and to everyone else, and what it means to some."""

MAX_PATTERN = 8192
MAX_OPTIONAL = 1000

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
HOURS = "(?:[01][0-9]|2[0-3])"
TIME = rf"{HOURS}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{HOURS}:[0-5][0-9])"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
"""Formats that llguidance reads too loosely: 29 February of every year, the year 0, a 61st second at any time."""
FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def held_pattern(value: Any) -> str:
    """Return a pattern as llguidance holds it. ValueError, which says why, for one that it would read otherwise."""
    if not isinstance(value, str):
        raise ValueError("must be a regular expression")
    if len(value.encode()) > MAX_PATTERN:
        raise ValueError(f"a pattern may have {MAX_PATTERN} bytes; say it in several properties, or more loosely")
    pieces = pieces_of(value)
    for piece in pieces:
        _check_piece(piece)
    _check_counts(pieces)
    check_optional(value)
    if flags := re.search(r"\(\?[^:=!<P]", "".join(piece for piece in pieces if len(piece) == 1)):
        raise ValueError(f"flags as in {flags[0]!r} are not those of a schema's patterns; write both letters in sets")
    return "".join(_written(piece) for piece in pieces)


def pieces_of(text: str) -> list[str]:
    """The pieces of a pattern, in time linear in its length. ValueError for a set or a name that is not closed."""
    pieces = []
    for found in PIECE.finditer(text):
        piece = found[0]
        if piece == "[":
            raise ValueError("a set that '[' begins is not closed by ']'; write \\[ for the character")
        is_name = piece in (r"\p", r"\P", r"\u", r"\x") and text.startswith("{", found.end())
        if is_name or re.match(r"\\[xu]\{[^}]*\Z", piece):
            raise ValueError(f"the name that {piece[:2]}{{ begins is not closed by '}}'")
        pieces.append(piece)
    return pieces


def num_optional(text: str) -> int:
    """How many pieces of a regular expression may be left out or repeated, or a few more.

    A lexer keeps a state for each way of leaving out those that follow each other, so its work grows with the square.
    """
    rest = re.sub(r"\s+", "", re.sub(r"\\.", "a", text, flags=re.DOTALL))
    return len(re.findall(r"[*+{]|(?<!\()\?", rest)) + len(NOTHING.findall(rest))


def _check_piece(piece: str) -> None:
    """Raise ValueError for a piece that not all readers take for the same, or that JSON would spell otherwise."""
    inside = piece[1:-1] if piece.startswith("[") and len(piece) > 1 else piece
    if piece in ("[]", "[^]"):
        raise ValueError(f"the set {piece} has more than one meaning; escape a ']' in it, or leave it out")
    if piece.startswith("[") and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", inside)):
        raise ValueError(f"the set {piece!r:.40} has more than one meaning; escape '[', '&', '-' and '~' in it")
    if any(not CATEGORY.fullmatch(name) for name in re.findall(r"\\[pP](?:\{[^}]*\}|.)", inside)):
        raise ValueError(f"{piece!r:.40} can be held for the categories L, M, N, P, S and Z only")
    if re.search(r"\x00|\\(?:0|x0|u00[01]|c|[xu]\{0*[01]?.?\})", inside) and not piece.startswith("[^"):
        raise ValueError(f"{piece!r:.40} names control characters, which JSON says by their numbers only")
    for letter in re.findall(r"\\([a-zA-Z])", re.sub(r"\\\\", "", inside)):
        if letter not in LETTERS and not (letter == "c" and piece.startswith("[^")):
            rule = "look-around that cannot be held" if letter in "bB" else "an escape sequence that is not known"
            raise ValueError(f"\\{letter} is {rule}; leave it out, or write the character without the backslash")


def _check_counts(pieces: list[str]) -> None:
    """Raise ValueError for a count behind a count, other than the ? that makes it lazy."""
    is_lazy = was_count = False
    for before, piece in zip(["(", *pieces], pieces, strict=False):
        is_count = COUNT.fullmatch(piece) is not None and before != "("
        if is_count and was_count and (is_lazy or piece != "?"):
            raise ValueError(f"the count {piece!r:.40} follows another one; put what it counts in a group")
        is_lazy, was_count = is_count and was_count, is_count


def check_optional(text: str) -> None:
    """Raise ValueError for an expression with more pieces that may be left out or repeated than can be followed."""
    if (num_pieces := num_optional(text)) > MAX_OPTIONAL:
        raise ValueError(
            f"{num_pieces} of its pieces may be left out or repeated, and at most {MAX_OPTIONAL} can be followed; "
            "say a repetition by a count, as in (?:ab?){0,99}"
        )


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Say a format by its own pattern."""
    pattern = PATTERNS.get(schema.get("format", ""))
    if pattern is None:
        return schema
    made = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in made:
        return {**made, "pattern": pattern}
    return {**made, "allOf": [*made.get("allOf", []), {"pattern": pattern}]}


def _written(piece: str) -> str:
    """A piece of a pattern: a set, an escape or a character, so that no two readers of it differ.

    A set that leaves out less is written without the character 0: llguidance lets a set with all control characters
    match an escaped quote and backslash, in it or not.
    """
    if piece == ".":
        return r"[^\n\r\u2028\u2029]"
    if piece in (r"\<", r"\>"):  # the borders of a word to Rust
        return piece[1:]
    if piece in (r"\s", r"\S"):
        return f"[{SPACES}]" if piece == r"\s" else f"[^{SPACES}{OTHER_SPACES}]"
    if re.match(r"\\P", piece):
        return rf"[^\p{piece[2:]}\x00]"
    if not piece.startswith("["):
        return piece
    few, many = SPACES, SPACES + OTHER_SPACES
    if piece.startswith("[^"):
        few, many, piece = many, few, rf"{piece[:-1]}\x00]"
    written = {r"\s": few, r"\S": f"[^{many}]"}
    return re.sub(r"\\.", lambda found: written.get(found[0], found[0]), piece, flags=re.DOTALL)
