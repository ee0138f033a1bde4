"""How long, how fast and on how blurred rows to train, from the size of a table: n rows of d columns.

The rules are for rows of mean zero and about unit covariance, and for an energy that starts at a reference fitted
to them. What they are made from:

- A row can be learned by heart, and the fewer there are the sooner. What held-out rows lose by it grows with the
  rate times the number of updates, and falls with n.
- A mixture that cross-validation chose leaves little to learn in a few hundred rows. With 0.03/d on top of it
  held-out rows of iris (n = 120, d = 4) lost 0.55 nats each, and wine (142, 13) lost 26 in two splits of four. With
  that times n/2000 iris still lost 0.013; with that times (n/2000)^(3/2) iris, wine, diabetes and breast cancer all
  stay within about 0.01 of the mixture.
- From 2000 rows on the reference is one Gaussian, and a network has much to do.
- More columns add up to larger changes of the energy in each update, so that the rate falls with d.
"""

from __future__ import annotations

MANY_ROWS = 2000
"""From here on rows are no reason to learn slowly."""
FEWEST_STEPS, MOST_STEPS = 100, 2000
HIGHEST_RATE, LOWEST_RATE = 0.01, 1e-4
"""The second is for images, whose many numbers go together."""


def default_steps(n: int, d: int) -> int:
    """Updates: 10·n^(2/3), at least 100 and at most 2000; `d` makes no difference.

    >>> default_steps(120, 4), default_steps(10_000, 2)
    (243, 2000)
    """
    return int(min(max(10 * n ** (2 / 3), FEWEST_STEPS), MOST_STEPS))


def default_learning_rate(n: int, d: int, mixture: bool = False) -> float:
    """Of Adam with a cosine to zero: 0.03/d, from 10⁻⁴ to 0.01; on a mixture times (n/2000)^(3/2), at most 1.

    >>> default_learning_rate(500, 2), round(default_learning_rate(500, 3, mixture=True), 6)
    (0.01, 0.00125)
    """
    few = min(1.0, n / MANY_ROWS) ** 1.5 if mixture else 1.0
    return min(HIGHEST_RATE, max(0.03 / d, LOWEST_RATE)) * few


def default_smoothing(n: int, d: int, mixture: bool) -> float:
    """s of the blur √(1 − s²)·x + s·ξ: none on a mixture, which cross-validation made as wide as it should be.

    On a Gaussian it is 0.35·n^(−1/(d + 4)), a third of Scott's rule for kernels, and what keeps a network from
    learning rows by heart.

    >>> default_smoothing(120, 4, mixture=True), round(default_smoothing(10_000, 2, mixture=False), 3)
    (0.0, 0.075)
    """
    return 0.0 if mixture else 0.35 * n ** (-1 / (d + 4))
