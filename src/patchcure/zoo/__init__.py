"""Trained weights: our own files, the released checkpoints of others, MAE and timm weights."""

from patchcure.zoo.files import load, save

__all__ = ["load", "save"]
