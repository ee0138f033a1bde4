"""Trainer, checkpoints, guard, device and precision."""

from .config import SGD, Adam, Schedule, TrainerConfig
from .trainer import Outcome, Trainer

__all__ = ["SGD", "Adam", "Outcome", "Schedule", "Trainer", "TrainerConfig"]
