"""Pixels that hardly change: the reference is fitted to what training sees, noise included."""

import torch

import metastable as ms


def test_data_noise_gives_still_pixels_a_density_that_the_reference_has_too():
    rng = torch.Generator().manual_seed(0)
    x = torch.zeros(200, 1, 8, 8)
    x[:, :, 2:6, 2:6] = torch.randn((200, 1, 4, 4), generator=rng)
    method = ms.methods.Jarzynski(walkers=128, populations=4)
    run = ms.fit("conv", x, method, steps=10, data_noise=0.1, evaluate=False, log_every=5)
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in run.history)
    border = run.energy.reference.scale[0, 0]
    assert 0.09 < float(border.mean()) / 1.2 < 0.11
    assert run.history[-1]["ess"] > 0.2
