"""Toy sets with known densities, image sets, and arrays from files, checked at the door."""

from .arrays import Dataset, Standardiser, check_data, check_labels, load_array, load_images
from .images import IMAGE_SETS, Images, ImageSet, open_images
from .toy import TOY_SETS, ToySet, toy_set

__all__ = [
    "IMAGE_SETS",
    "TOY_SETS",
    "Dataset",
    "ImageSet",
    "Images",
    "Standardiser",
    "ToySet",
    "check_data",
    "check_labels",
    "load_array",
    "load_images",
    "open_images",
    "toy_set",
]
