"""Networks that can be split: the contract, ViT, ResNet/BagNet, any classifier at k = 0, ablated ones, a small CNN."""

from patchcure.models.ablated import DroppingViT, TwoSignClassifier
from patchcure.models.bagnet import BagResNet
from patchcure.models.base import SplitModel
from patchcure.models.classifier import AnyClassifier
from patchcure.models.ibp import small_cnn
from patchcure.models.resnet import SplitResNet
from patchcure.models.vit import SplitViT

__all__ = [
    "AnyClassifier",
    "BagResNet",
    "DroppingViT",
    "SplitModel",
    "SplitResNet",
    "SplitViT",
    "TwoSignClassifier",
    "small_cnn",
]
