"""Networks that can be split: the contract, ViT, ResNet/BagNet, any classifier at k = 0, and a small CNN for that."""

from patchcure.models.bagnet import BagResNet
from patchcure.models.base import SplitModel
from patchcure.models.classifier import AnyClassifier
from patchcure.models.ibp import small_cnn
from patchcure.models.resnet import SplitResNet
from patchcure.models.vit import SplitViT

__all__ = ["AnyClassifier", "BagResNet", "SplitModel", "SplitResNet", "SplitViT", "small_cnn"]
