"""What became of a row (docs/draw.md, 7)."""

OK = 0
BAD = 1  # NaN or +inf in the model's row
EMPTY = 2  # every token is -inf

NO_TOKEN = -1
