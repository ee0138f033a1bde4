"""Toy sets with known densities, and arrays from files, checked at the door."""

from .arrays import Dataset, Standardiser, check_data, load_array
from .toy import TOY_SETS, ToySet, toy_set

__all__ = ["TOY_SETS", "Dataset", "Standardiser", "ToySet", "check_data", "load_array", "toy_set"]
