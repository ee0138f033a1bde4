"""Neural energies, and the exact start: a normalised reference plus a network that begins at zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, pad
from torch.nn.utils import parametrize

from metastable.core.errors import InputError, require, require_choice, require_count
from metastable.core.perceptron import Perceptron
from metastable.core.precision import last_sum, on_tensor_cores, unrounded
from metastable.core.protocols import Gaussianlike, ZeroStarting, perceptron_of, provides
from metastable.core.random import seeded
from metastable.core.types import Proposal, as_shape
from metastable.proposals import fit_gaussian

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}
SMALL = 1024
"""Pixels up to which the first convolution is made as one product on a GPU."""


class MLP(nn.Module):
    """A multilayer perceptron from events of any shape to one energy per row.

    Args:
        event_shape: shape of one event, or its dimension.
        hidden: widths of the hidden layers.
        activation: `silu`, `softplus`, `tanh`, `gelu` or `leaky_relu`.
        seed: of the initial weights; nothing global is touched.
        outputs: logits in a row, `(B, outputs)`, in the place of one energy, `(B,)`.

    >>> MLP(2, hidden=(16, 16), seed=0)(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        event_shape: int | Sequence[int],
        hidden: Sequence[int] = (128, 128),
        activation: str = "silu",
        seed: int = 0,
        outputs: int | None = None,
    ):
        super().__init__()
        require_choice("activation", activation, ACTIVATIONS)
        for i, width in enumerate(hidden):
            require_count(f"hidden.{i}", width)
        self.event_shape = as_shape(event_shape)
        widths = [math.prod(self.event_shape), *hidden]
        with seeded(seed):
            layers: list[nn.Module] = []
            for i, o in itertools.pairwise(widths):
                layers += [nn.Linear(i, o), ACTIVATIONS[activation]()]
            self.body = nn.Sequential(*layers)
            self.head = nn.Linear(widths[-1], outputs or 1)
        self.outputs, self.activation = outputs, activation

    def forward(self, x: Tensor) -> Tensor:
        made = last_sum(self.head, self.body(x.flatten(1)))
        return made.squeeze(-1) if self.outputs is None else made

    def perceptron(self) -> Perceptron | None:
        """Its layers; None where it has logits, no hidden layer, or a `forward` of its own."""
        if self.outputs is not None or not len(self.body) or type(self).forward is not MLP.forward:
            return None
        layers: list[nn.Linear] = list(self.body[::2])  # pyright: ignore
        weights, biases = tuple(m.weight for m in layers), tuple(m.bias for m in layers)
        return Perceptron(weights, biases, self.head.weight[0], self.head.bias, self.activation)


def dense_conv(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` as a product with the whole matrix of the convolution, made from the images of one lit pixel.

    For few channels tensor cores make this sooner than what else a GPU has for a convolution.
    """
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    points = torch.eye(x[0].numel(), device=x.device, dtype=x.dtype).view(-1, *x.shape[1:])
    made = conv2d(points, layer.weight, None, layer.stride, layer.padding)  # pyright: ignore
    _, c, h, w = made.shape
    matrix = made.permute(0, 2, 3, 1).reshape(len(points), -1)
    return torch.addmm(layer.bias.repeat(h * w), x.flatten(1), matrix).view(-1, h, w, c).permute(0, 3, 1, 2)


def patch_conv(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` as a product with the pixels around each pixel, in rows whose length tensor cores take.

    For pictures of few channels a GPU's convolutions leave most of their time to padding; compilers make the rows
    as they are read.
    """
    assert isinstance(layer, nn.Conv2d)
    (k, m), (s, t), (p, q) = layer.kernel_size, layer.stride, layer.padding  # pyright: ignore
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))  # fewer bytes, rounded as the product would
    wide = pad(x.permute(0, 2, 3, 1), (0, 0, q, q, p, p))  # pyright: ignore
    high, long = (wide.shape[1] - k) // s + 1, (wide.shape[2] - m) // t + 1
    parts = [wide[:, i : i + s * high : s, j : j + t * long : t] for i in range(k) for j in range(m)]
    rows = torch.cat(parts, -1)  # (B, H, W, k·m·C): channels lie side by side, as they are read
    weight = layer.weight.permute(0, 2, 3, 1).flatten(1)
    more = (0, -rows.shape[-1] % 8)
    return linear(pad(rows, more), pad(weight, more), layer.bias).permute(0, 3, 1, 2)


class ConvNet(nn.Module):
    """The small convolutional energy of the Jarzynski paper's MNIST runs (76,993 parameters on 28 × 28).

    Strided convolutions 16-32-64-64, then two linear layers, SiLU throughout; takes `(B, C, H, W)` and returns one
    energy per row, `(B,)`, or logits, `(B, outputs)`.
    """

    def __init__(self, event_shape: Sequence[int], seed: int = 0, outputs: int | None = None):
        super().__init__()
        require(len(event_shape) == 3, "event_shape", "(channels, height, width)", tuple(event_shape))
        self.event_shape = tuple(event_shape)
        with seeded(seed):
            self.body = nn.Sequential(
                nn.Conv2d(event_shape[0], 16, 5, stride=2, padding=4),
                nn.SiLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Conv2d(32, 64, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Conv2d(64, 64, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Flatten(),
            )
            width = self.body(torch.zeros(1, *event_shape)).shape[1]
            self.body.append(nn.Linear(width, 64)).append(nn.SiLU())
            self.head = nn.Linear(64, outputs or 1)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        dense = x.is_cuda and x[0].numel() <= SMALL and on_tensor_cores(x)
        h = self.body[1:](dense_conv(self.body[0], x)) if dense else self.body(x)
        made = last_sum(self.head, h)
        return made.squeeze(-1) if self.outputs is None else made


class Tilted(nn.Module):
    """E(x) = −log q(x) + f(x): a normalised reference q tilted by a network f.

    With the last layer of f at zero the model is q exactly: walkers start as exact draws of q and
    log Z₀ = 0 is known, which is what makes every later Jarzynski weight exact. As long as f grows slower
    than −log q the model stays normalisable, which a bare network does not promise.

    Args:
        reference: a normalised density (`metastable.proposals`).
        network: any module from `(B, *event)` to `(B,)`.
        zero_start: set the weights of the network's last linear or convolutional layer to zero.
    """

    def __init__(self, reference: nn.Module, network: nn.Module, zero_start: bool = True):
        super().__init__()
        self.reference = reference
        self.network = network
        self.event_shape: tuple[int, ...] = reference.event_shape  # pyright: ignore
        if zero_start:
            zero_last_layer(network)

    def forward(self, x: Tensor) -> Tensor:
        with unrounded(x):  # hundreds of nats, which log Z₀ = 0 is exact for
            log_q = self.reference.log_prob(x)  # pyright: ignore
        return self.network(x) - log_q

    def perceptron(self) -> Perceptron | None:
        """The network's layers on the reference's Gaussians; None where one of them has none."""
        layers = perceptron_of(self.network)
        plain = layers is not None and layers.below is None and type(self).forward is Tilted.forward
        known = plain and provides(self.reference, Gaussianlike)
        return layers._replace(below=self.reference.gaussians()) if known else None  # pyright: ignore

    def exact_start(self, probe: Tensor) -> Proposal | None:
        """The density this energy equals now, if the network is exactly zero on `probe`; else None."""
        with torch.no_grad():
            is_zero = bool((self.network(probe) == 0).all())
        return self.reference if is_zero else None  # pyright: ignore


def on_reference(network: nn.Module, x: Tensor, inflate: float = 1.2, zero_start: bool = True) -> Tilted:
    """The network on a Gaussian fitted to the data: an energy that can hold a density, whatever the network is.

    Args:
        network: any module from `(B, *event)` to `(B,)`; its last layer is set to zero, in place, so that the model
            begins as the Gaussian.
        x: rows of the data, `(n, *event)`, as training will see them.
        inflate: the Gaussian's standard deviations are the data's times this.
        zero_start: False leaves the network's weights as they are.

    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> energy = on_reference(MLP(2), x)
    >>> bool((energy(x) == -energy.reference.log_prob(x)).all())
    True
    """
    reference = fit_gaussian(x, inflate=inflate)
    home = next(iter(network.parameters()), None)
    reference = reference if home is None else reference.to(device=home.device, dtype=home.dtype)
    return Tilted(reference, network, zero_start)


def zero_last_layer(network: nn.Module) -> None:
    """Set weights and bias of the last layer that has them to zero, in place.

    A network that knows better how to be zero says so in `start_at_zero`.
    """
    if provides(network, ZeroStarting):
        network.start_at_zero()  # pyright: ignore
        return
    layers = [m for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if not layers:
        raise InputError("network: has no linear or convolutional layer to start at zero")
    if parametrize.is_parametrized(layers[-1], "weight"):
        raise InputError(
            "network: the weight of its last layer is parametrised and cannot be set to zero; give the network a "
            "`start_at_zero` method, or use Tilted(..., zero_start=False)"
        )
    nn.init.zeros_(layers[-1].weight)
    if layers[-1].bias is not None:
        nn.init.zeros_(layers[-1].bias)
