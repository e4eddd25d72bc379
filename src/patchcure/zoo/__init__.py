"""Trained weights: our own files, the released checkpoints of others, MAE and timm weights."""

from patchcure.zoo.files import holds, load, save

__all__ = ["holds", "load", "save"]
