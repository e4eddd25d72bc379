"""Trained weights: our own files, the released checkpoints of others, MAE and timm weights."""

from patchcure.zoo.files import cards, holds, load, named, save

__all__ = ["cards", "holds", "load", "named", "save"]
