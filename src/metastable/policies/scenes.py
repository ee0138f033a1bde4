"""What a policy may do next: many chunks at once, to be drawn on the scene."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from metastable.core.random import derive

from .policy import Policy


@torch.no_grad()
def first_chunks(policy: Policy, observation: Any, n: int = 64, seed: int = 0) -> np.ndarray:
    """`n` chunks of each of B environments at their start, `(B, n, N_pred, A)`: draws before any is chosen."""
    config = policy.config
    seen = {key: torch.as_tensor(value)[:, None] for key, value in observation.items()}
    windows = {key: value.expand(-1, config.context, *value.shape[2:]) for key, value in seen.items()}
    x = policy.model.draw(policy.scaling.pack(windows), n, derive(seed, "scene"))
    return policy.scaling.to_actions(
        x.unflatten(2, (config.prediction, policy.actions)).cpu(), windows
    ).numpy()
