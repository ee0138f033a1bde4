"""The same Langevin chain in other libraries, on the same weights from the same positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metastable.core.errors import need
from metastable.energies import MLP

EXTRA = "bench"
PURPOSE = "the sampler benchmark"

Chain = Callable[[int], Any]
"""Runs that many steps, and returns where the chains are, `(chains, *event)`."""


def problem(chains: int, hidden: Sequence[int], seed: int) -> tuple[MLP, Tensor]:
    """The network and the positions that every sampler starts from."""
    net = MLP(2, tuple(hidden), seed=seed).requires_grad_(False)
    return net, torch.randn((chains, 2), generator=torch.Generator().manual_seed(seed))


def torchebm_chain(net: torch.nn.Module, x: Tensor, step_size: float) -> Chain:
    """TorchEBM's `LangevinDynamics` without trajectory or diagnostics, the least it can be asked to do."""
    core = need("torchebm.core", EXTRA, PURPOSE)
    samplers = need("torchebm.samplers", EXTRA, PURPOSE)

    class Wrapped(core.BaseModel):
        def __init__(self) -> None:
            super().__init__(device=x.device)
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    sampler = samplers.LangevinDynamics(Wrapped(), step_size=step_size, noise_scale=1.0, device=x.device)
    return lambda steps: sampler.sample(x=x, n_steps=steps)


def jax_energy(net: MLP) -> Callable[[Any], Any]:
    """The same network in `jax.numpy`, `(B, 2)` to `(B,)`."""
    jax = need("jax", EXTRA, PURPOSE)
    linear = [layer for layer in net.modules() if isinstance(layer, torch.nn.Linear)]
    weights = [
        (jax.numpy.asarray(l.weight.T.cpu().numpy()), jax.numpy.asarray(l.bias.cpu().numpy())) for l in linear
    ]

    def energy(x: Any) -> Any:
        for weight, bias in weights[:-1]:
            x = jax.nn.silu(x @ weight + bias)
        weight, bias = weights[-1]
        return (x @ weight + bias)[:, 0]

    return energy


def jax_chain(net: MLP, x: Tensor, step_size: float) -> Chain:
    """A jitted `lax.scan`; the normals are drawn inside it."""
    jax = need("jax", EXTRA, PURPOSE)
    energy = jax_energy(net)
    grad = jax.grad(lambda x: energy(x).sum())
    sigma = (2 * step_size) ** 0.5

    def step(carry: Any, _: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (x - step_size * grad(x) + sigma * jax.random.normal(own, x.shape), key), None

    def scan(x: Any, key: Any, steps: int) -> Any:
        return jax.lax.scan(step, (x, key), None, length=steps)[0][0]

    compiled = jax.jit(scan, static_argnums=2)
    start, key = jax.numpy.asarray(x.cpu().numpy()), jax.random.PRNGKey(0)
    return lambda steps: compiled(start, key, steps).block_until_ready()
