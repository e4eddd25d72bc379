"""The shapes in the signatures are true: jaxtyping checks them while every model and operation runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from jaxtyping import TypeCheckError, install_import_hook
rooms = [f"patchcure.{room}" for room in ("geometry", "preprocess", "threat", "masks", "models", "operations")]
with install_import_hook(rooms, "beartype.beartype"):
    import patchcure.operations, patchcure.models.bagnet
import torch
from torch import nn
from patchcure import *
from patchcure._torchvision import ensure_torchvision
from patchcure.models.bagnet import DESIGNS, BagResNet
from patchcure.operations import OPERATIONS
ensure_torchvision()
from timm.models.vision_transformer import VisionTransformer

def vit(flavour, k):
    backbone = VisionTransformer(img_size=48, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    return SplitViT(backbone, (6, 1), k, flavour)

def resnet(k):
    design = DESIGNS[18]
    return SplitResNet(BagResNet(design, design.kernels[9], design.blocks_before(k), 5, width=4), 48, k)

models = [vit("ours", 1), vit("ours", 2), vit("published", 0), vit("published", 2), resnet(18), resnet(9)]
models.append(AnyClassifier(nn.Sequential(nn.Flatten(), nn.Linear(6912, 5)), 48, 5))
for model in models:
    threat = PatchThreat.rectangles([(3, 1), (1, 2)], 48)
    masks = MaskSet.covering(threat.on_features(model.grid, model.corrupted), per_axis=(3, 5))
    few = ("double-masking", "challenger", "minority-reports", "agreement")
    rules = [OPERATIONS[name] for name in few] if model.grid.cells > 100 else OPERATIONS.values()
    for operation in (rule for rule in rules if rule.together):
        defense = Defense(model, threat, masks, operation)
        images = torch.rand(3, 3, 48, 48)
        labels = defense.predict(images).labels.clamp(min=0)
        for detail in ("verdict", "locations", "margins"):
            defense.certify(images, labels, detail)
Resize(Grid(16, 16), Grid(32, 32))(torch.rand(2, 3, 16, 16))
try:
    patchcure.operations.base.majority(torch.zeros(3), 2)
except TypeCheckError:
    print("wrong shapes are found")
"""


@pytest.mark.slow
def test_signatures_hold_while_everything_runs() -> None:
    pytest.importorskip("beartype")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "wrong shapes are found\n"
