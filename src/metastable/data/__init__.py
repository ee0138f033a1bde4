"""Toy sets with known densities, image sets, and arrays from files, checked at the door."""

from .arrays import Dataset, load_array, load_images
from .checks import check_data, check_labels
from .conditional_toy import CONDITIONAL_TOY_SETS, ConditionalToySet, conditional_toy_set
from .demonstration_files import (
    load_episodes,
    load_lasa,
    load_lerobot,
    load_pusht,
    pusht_observation,
    save_episodes,
)
from .demonstrations import Demonstrations, Scaling, Windows
from .image_files import IMAGE_SETS, ImageSet
from .images import Images, open_images
from .standardiser import Standardiser
from .toy import TOY_SETS, ToySet, toy_set

__all__ = [
    "CONDITIONAL_TOY_SETS",
    "IMAGE_SETS",
    "TOY_SETS",
    "ConditionalToySet",
    "Dataset",
    "Demonstrations",
    "ImageSet",
    "Images",
    "Scaling",
    "Standardiser",
    "ToySet",
    "Windows",
    "check_data",
    "check_labels",
    "conditional_toy_set",
    "load_array",
    "load_episodes",
    "load_images",
    "load_lasa",
    "load_lerobot",
    "load_pusht",
    "open_images",
    "pusht_observation",
    "save_episodes",
    "toy_set",
]
