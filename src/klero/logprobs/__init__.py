"""What is said about a token: its logprob, its rank, the likeliest others, what it was drawn from (docs/draw.md, 8).

`reference.py` is the definition. raw: (l - m) - lse(Q) of the model's own row at temperature 1, whatever the request
asks for. processed: s - lse(Q_kept) of what the filters left, -inf elsewhere; a greedy row is a point mass. rank: 1 +
the tokens strictly greater in the row of the mode. The receipt of a token is raw, processed, ln of the kept mass and
the number kept. -inf stays -inf. Nothing of it changes a token, and a row pays for what it asks. Agreement: *bits*.
"""

from klero.logprobs.asks import Asks, Said, alone, asks_of, logprobs_of, room_for, without_raw
from klero.logprobs.record import Entry, Logprobs, join, nothing
from klero.logprobs.scoring import raw_kernel, score

__all__ = [
    "Asks",
    "Entry",
    "Logprobs",
    "Said",
    "alone",
    "asks_of",
    "join",
    "logprobs_of",
    "nothing",
    "raw_kernel",
    "room_for",
    "score",
    "without_raw",
]
