"""Samples as pictures: FID and its kin, copying and shares of classes, where somebody asks for them."""

from __future__ import annotations

from metastable.evaluation.image_measures import image_measures

from .section import Judged, Measured


class Images:
    """Measures of images, all numbers under one name."""

    name = "images"

    def applies(self, judged: Judged) -> bool:
        """Somebody must have asked."""
        return judged.images is not None

    def measure(self, judged: Judged) -> Measured:
        """In the data's units, as the question holds them."""
        assert judged.images is not None
        numbers, arrays = image_measures(judged.images, judged.seed)
        return Measured({"images": numbers}, arrays)
