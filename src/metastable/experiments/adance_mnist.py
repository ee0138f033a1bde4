"""Figures 3.1 to 3.3 of the AdaNCE thesis with its own settings on MNIST: rate 10⁻⁴ and 100 Langevin steps.

`adance-stability` trains small digits at ten times the rate, with chains of 20 steps. Here the course, the rows and
the figures are the same, and what differs is what the thesis says (Section 5.1.2): 100 steps, Adam at 10⁻⁴, a
buffer of 10,000, batches of 128, R of Figure 3.3 (50 % and 100 %) beside its own 25 % and 0 %. The thesis trains a
network of 5.97 million parameters for an unknown number of updates; the network here is smaller, and the updates
are few, so that where long chains end is reported and not required.
"""

from __future__ import annotations

from .adance_stability import body
from .base import Experiment
from .trials import by_scale

EXPERIMENT = Experiment(
    name="adance-mnist",
    title="MNIST with the thesis's settings: rejuvenation and spectral normalisation (Fig. 3.1–3.3)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Section 5.1",
    scales=by_scale(
        {"interval": 5, "rate": 1e-4, "judge_long_run": False},
        images=("digits", "mnist", "mnist"),
        rejuvenations=((0.5, 1.0), (0.5, 1.0), (0.0, 0.25, 0.5, 1.0)),
        size=(8, 28, 28),
        image_rows=(1797, 2000, 10_000),
        widths=((16,), (16, 32), (32, 64, 128)),
        hidden=(32, 64, 128),
        langevin=(20, 100, 100),
        buffer=(256, 1000, 10_000),
        batch=(32, 32, 128),
        steps=(40, 300, 1500),
        long_chains=(50, 200, 500),
        long_steps=(100, 500, 2000),
        worse_target=(0.0, 0.0, 0.5),
    ),
    body=body,
)
