"""The float32 constants of docs/draw.md, section 6, as decimal text there and here."""

import numpy as np

f32 = np.float32

EXP_MIN = f32(-87.0)
LOG2_E = f32(1.44269504088896341)
ROUND_MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to the nearest integer, ties to even
LN2_HIGH = f32(0.693359375)
LN2_LOW = f32(-2.12194440e-4)
EXP_POLY = tuple(
    f32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
SQRT_HALF = f32(0.707106781186547524)
LOG_POLY = tuple(
    f32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
