"""PatchCURE: image classifiers that are provably robust to adversarial patches."""

from patchcure.certificate import Certificate, Prediction
from patchcure.defense import Defense
from patchcure.geometry import Box, Grid
from patchcure.masks import MaskSet
from patchcure.models import AnyClassifier, SplitModel, SplitResNet, SplitViT
from patchcure.names import build
from patchcure.preprocess import Resize
from patchcure.threat import PatchThreat
from patchcure.zoo import load, save

__version__ = "0.1.0"

__all__ = [
    "AnyClassifier",
    "Box",
    "Certificate",
    "Defense",
    "Grid",
    "MaskSet",
    "PatchThreat",
    "Prediction",
    "Resize",
    "SplitModel",
    "SplitResNet",
    "SplitViT",
    "build",
    "load",
    "save",
]
