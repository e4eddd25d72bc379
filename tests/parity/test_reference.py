"""The production path equals the plain reference: logits under masks, double masking, certificates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from patchcure import AnyClassifier, Defense, PatchThreat, SplitModel, SplitResNet, SplitViT, reference
from patchcure._torchvision import ensure_torchvision
from patchcure.models.bagnet import DESIGNS, BagResNet
from patchcure.operations import DoubleMasking
from patchcure.operations.base import tolerance

ensure_torchvision()
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

VITS = [
    (window, k, flavour, norm_order)
    for window in ((4, 1), (1, 4), (2, 2), (1, 1))
    for k in (0, 1, 3)
    for flavour, norm_order in (("ours", "before-pool"), ("published", "before-pool"), ("published", "after-pool"))
]


def small_vit(window: tuple[int, int], k: int, flavour: str, norm_order: str = "before-pool", **extra: Any) -> SplitViT:
    torch.manual_seed(7)
    arguments: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
    vit = VisionTransformer(**(arguments | {"num_classes": 5, "global_pool": "avg"} | extra))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = SplitViT(vit, window, k, flavour=flavour, norm_order=norm_order).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # no label is everybody's favourite
        counted = model.grid.cells if flavour == "published" and k == 3 else 1
        vit.head.bias -= model(torch.rand(64, 3, model.image.height, model.image.width)).mean(0) / counted
    return model


def small_resnet(
    depth: int, field: int, k: int, flavour: str = "ours", image: int = 32, bag_k: int | None = None
) -> SplitResNet:
    torch.manual_seed(7)
    design = DESIGNS[depth]
    network = BagResNet(design, design.kernels[field], design.blocks_before(bag_k or k), num_classes=5, width=4)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.8, 1.2)
    return SplitResNet(network, image, k, flavour=flavour).eval()  # type: ignore[arg-type]


def check_logits(model: SplitModel, jobs: int = 24) -> None:
    """Random masks of random sizes on a batch, beside the reference one by one."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(3, 3, model.image.height, model.image.width, generator=generator)
    share = torch.rand(jobs, 1, 1, generator=generator)
    hidden = torch.rand(jobs, model.grid.height, model.grid.width, generator=generator) < share
    hidden[:, 0, -1] = False
    index = torch.randint(0, 3, (jobs,), generator=generator)
    with torch.no_grad():
        fast = model.logits(model.features(images), index, hidden)
    plain = torch.stack([reference.logits(model, images[i], h) for i, h in zip(index, hidden, strict=True)])
    assert ((fast - plain).abs().amax(1) <= tolerance(plain)).all()
    nothing = torch.zeros_like(hidden[0])
    with torch.no_grad():
        whole = model(images)
    plain = torch.stack([reference.logits(model, image, nothing) for image in images])
    assert ((whole - plain).abs().amax(1) <= tolerance(plain)).all()


@pytest.mark.parametrize(("window", "k", "flavour", "norm_order"), VITS)
def test_vit_logits(window: tuple[int, int], k: int, flavour: str, norm_order: str) -> None:
    check_logits(small_vit(window, k, flavour, norm_order))


@pytest.mark.parametrize(
    "extra",
    [
        {"img_size": (32, 64)},
        {"class_token": False},
        {"reg_tokens": 2},
        {"no_embed_class": True},
        {"pre_norm": True},
        {"init_values": 0.1, "qk_norm": True},
        {"global_pool": "token"},
        {"pos_embed": "none"},
    ],
    ids=str,
)
def test_vit_variants_of_timm(extra: dict[str, Any]) -> None:
    check_logits(small_vit((2, 2), 1, "ours", **extra))


@pytest.mark.parametrize(
    ("depth", "field", "k"),
    [(50, 9, 50), (50, 17, 50), (50, 17, 10), (50, 17, 1), (18, 5, 18), (18, 9, 7), (18, 13, 18), (18, 9, 3)],
)
@pytest.mark.parametrize("flavour", ["ours", "published"])
def test_resnet_logits(depth: int, field: int, k: int, flavour: str) -> None:
    check_logits(small_resnet(depth, field, k, flavour, image=40))


@pytest.mark.parametrize(("field", "k", "bag_k"), [(5, 1, 9), (5, 5, 9), (9, 3, 18)])
def test_a_hybrid_can_be_split_before_its_bagnet_ends(field: int, k: int, bag_k: int) -> None:
    model = small_resnet(18, field, k, bag_k=bag_k)
    check_logits(model)
    with torch.no_grad():
        images = torch.rand(2, 3, 32, 32)
        assert torch.allclose(model(images), small_resnet(18, field, bag_k)(images), atol=1e-5)


def test_any_classifier_logits() -> None:
    torch.manual_seed(7)
    network = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    network(torch.zeros(1, 3, 12, 16))
    check_logits(AnyClassifier(network, image=(12, 16), num_classes=5).eval())


@pytest.mark.parametrize("rule", ["majority", "unmasked"])
@pytest.mark.parametrize(
    ("window", "k", "flavour"), [((6, 1), 3, "ours"), ((6, 1), 1, "published"), ((2, 2), 3, "ours")]
)
def test_double_masking_is_the_pseudocode(window: tuple[int, int], k: int, flavour: str, rule: str) -> None:
    model = small_vit(window, k, flavour, img_size=48)
    defense = Defense(model, PatchThreat.square(8, image=48), operation=DoubleMasking(rule))  # type: ignore[arg-type]
    images = torch.rand(24, 3, 48, 48, generator=torch.Generator().manual_seed(3))
    prediction = defense.predict(images)
    plain = [reference.infer(model, image, defense.masks, rule) for image in images]  # type: ignore[arg-type]
    assert prediction.labels.tolist() == plain
    assert prediction.unanimous.any() and not prediction.unanimous.all(), "both rounds should be exercised"
    certificate = defense.certify(images, prediction.labels)
    assert certificate.strict.tolist() == [
        reference.certify(model, image, defense.masks, int(y))
        for image, y in zip(images, prediction.labels, strict=True)
    ]


def test_batches_of_jobs_do_not_matter() -> None:
    """`max_jobs` bounds the memory and changes no label."""
    images = torch.rand(6, 3, 48, 48, generator=torch.Generator().manual_seed(3))
    answers = []
    for jobs in (1, 5, 64):
        model = small_vit((2, 2), 1, "ours", img_size=48)
        model.max_jobs = jobs
        defense = Defense(model, PatchThreat.square(8, image=48))
        prediction = defense.predict(images)
        answers.append((prediction.labels.tolist(), defense.certify(images, prediction.labels).certified.tolist()))
    assert answers[0] == answers[1] == answers[2]
