"""Models made for ablations: equal to the plain reference, blind to what is hidden, and votes as in the pseudocode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchcure import Defense, PatchThreat, SplitModel, reference
from patchcure._torchvision import ensure_torchvision
from patchcure.ablations import Ablation
from patchcure.models import DroppingViT, TwoSignClassifier
from patchcure.operations import Voting
from patchcure.operations.base import tolerance

ensure_torchvision()
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

VARIANTS: list[dict[str, Any]] = [
    {},
    {"global_pool": "avg"},
    {"global_pool": "avg", "img_size": (24, 40)},
    {"global_pool": "avg", "class_token": False},
    {"reg_tokens": 2},
    {"no_embed_class": True, "reg_tokens": 1},
    {"pre_norm": True},
    {"init_values": 0.1, "qk_norm": True},
    {"pos_embed": "none"},
    {"patch_size": (4, 8)},
]


def dropping(**extra: Any) -> DroppingViT:
    torch.manual_seed(7)
    arguments: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
    vit = VisionTransformer(**(arguments | {"num_classes": 5, "global_pool": "token"} | extra))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    return centred(DroppingViT(vit, max_jobs=16), vit.head)  # type: ignore[return-value,arg-type]


def two_sign(image: tuple[int, int] = (20, 24)) -> TwoSignClassifier:
    torch.manual_seed(7)
    head = nn.Linear(8, 5)
    network = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    return centred(TwoSignClassifier(network, image, 5), head)  # type: ignore[return-value]


def centred(model: SplitModel, head: nn.Linear) -> SplitModel:
    """The model, with weights such that bands get many different labels."""
    model.eval()
    hidden = torch.ones(32, model.grid.height, model.grid.width, dtype=torch.bool)
    for index, row in enumerate(hidden):
        row[:, index % (model.grid.width - 4) :][:, :4] = False
    with torch.no_grad():
        logits = model.logits(model.features(images(model, 32, 5)), torch.arange(32), hidden)
        head.bias.copy_((head.bias - logits.mean(0)) / logits.std(0))
        head.weight.copy_(head.weight / logits.std(0)[:, None])
    return model


def images(model: SplitModel, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, len(model.mean), model.image.height, model.image.width, generator=generator)


def some_hidden(model: SplitModel, jobs: int) -> Tensor:
    """Bands, blocks and scattered pixels."""
    bands = Ablation(width=5, stride=3).on(model.grid) + Ablation(6, 9, stride=7).on(model.grid)
    hidden = torch.rand(jobs, model.grid.height, model.grid.width, generator=torch.Generator().manual_seed(2)) < 0.9
    for row, boxes in zip(hidden[: jobs // 2], bands[:: max(1, 2 * len(bands) // jobs)], strict=False):
        row[:] = False
        for box in boxes:
            row[box.top : box.bottom, box.left : box.right] = True
    return hidden


@pytest.mark.parametrize("extra", [*VARIANTS, None], ids=str)
def test_logits_are_the_reference(extra: dict[str, Any] | None) -> None:
    model: SplitModel = two_sign() if extra is None else dropping(**extra)
    hidden = some_hidden(model, 40)
    index = torch.arange(40) % 3
    pixels = images(model, 3)
    with torch.no_grad():
        fast = model.logits(model.features(pixels), index, hidden)
        whole = model(pixels)
    plain = torch.stack([reference.logits(model, pixels[i], h) for i, h in zip(index, hidden, strict=True)])
    assert ((fast - plain).abs().amax(1) <= tolerance(plain)).all()
    if extra is not None:
        with torch.no_grad():
            assert torch.allclose(whole, model.backbone(model.normalize(pixels)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dropping", "two-sign"])
@pytest.mark.parametrize("content", [torch.nan, torch.inf, 1e30])
def test_hidden_pixels_never_reach_the_logits(kind: str, content: float) -> None:
    """Bit-identical, whatever an untouched ablation hides; and a touched one does see the patch."""
    model: SplitModel = dropping() if kind == "dropping" else two_sign()
    threat = PatchThreat.square(5, model.image)
    masks = Ablation(width=7, stride=3).masks(threat.on_features(model.grid, model.corrupted))
    pixels = images(model, 1)
    index = torch.zeros(len(masks), dtype=torch.long)
    with torch.no_grad():
        clean = model.logits(model.features(pixels), index, masks.hidden)
    for row, col in [(0, 0), (3, 9), (model.image.height - 5, model.image.width - 5)]:
        touched = ~masks.coverage.covers[masks.coverage.maps[0][row, col]]
        patched = pixels.clone()
        patched[..., row : row + 5, col : col + 5] = content
        with torch.no_grad():
            logits = model.logits(model.features(patched), index, masks.hidden)
        assert torch.equal(clean[~touched], logits[~touched])
        assert bool((clean[touched] != logits[touched]).any(1).all())
        assert 0 < int(touched.sum()) < len(masks)


@pytest.mark.parametrize("kind", ["dropping", "two-sign"])
def test_other_batches_stay_within_the_tolerance(kind: str) -> None:
    model: SplitModel = dropping(embed_dim=48) if kind == "dropping" else two_sign()
    hidden = some_hidden(model, 60)
    pixels = images(model, 6)
    index = torch.arange(60) % 6
    worst = 0.0
    with torch.no_grad():
        together = model.logits(model.features(pixels), index, hidden)
        for jobs in (1, 3, 7, 60):
            model.max_jobs = jobs
            other = model.logits(model.features(pixels.flip(0)), 5 - index.flip(0), hidden.flip(0)).flip(0)
            worst = max(worst, float(((together - other).abs().amax(1) / tolerance(together)).max()))
    assert worst < 0.5


def test_dropped_tokens_are_isolated_units() -> None:
    """ECViT puts all units side by side and lets attention stay inside each: the same function as dropping tokens."""
    model = dropping(global_pool="avg")
    vit: Any = model.backbone
    hidden = torch.ones(8, 32, 32, dtype=torch.bool)
    for unit in range(8):
        hidden[unit, :, 4 * unit : 4 * unit + 4] = False
    pixels = images(model, 1)
    with torch.no_grad():
        dropped = model.logits(model.features(pixels), torch.zeros(8, dtype=torch.long), hidden)
        features = model.features(pixels)
        units = []
        for row in hidden:
            tokens = vit._pos_embed(vit.patch_embed(torch.where(row, 0, features)))
            seen = (~row).unflatten(0, (4, 8)).unflatten(2, (4, 8)).any(3).any(1).flatten()
            units.append(torch.cat([tokens[0, :1], tokens[0, 1:][seen]]))
        sizes = [len(unit) for unit in units]
        x = torch.cat(units)[None]
        inside = torch.block_diag(*[torch.ones(size, size) for size in sizes]).bool()[None, None]
        for block in vit.blocks:
            x = block(x, attn_mask=inside)
        logits = torch.cat([vit.forward_head(unit[None]) for unit in vit.norm(x)[0].split(sizes)])
    assert torch.allclose(dropped, logits, rtol=1e-4, atol=1e-5)


def test_only_visible_tokens_are_computed() -> None:
    """A band of 5 pixels crosses one or two of the four columns of tokens; equal lengths go together."""
    model = dropping()
    sizes: list[tuple[int, ...]] = []
    model.backbone.blocks[0].register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape[:2])))
    defense = Defense(model, PatchThreat.square(4, 32), operation=Voting(Ablation(width=5)))
    prediction = defense.predict(images(model, 2))
    assert {tokens for _, tokens in sizes} == {1 + 4, 1 + 8}
    assert sum(jobs for jobs, _ in sizes) == 2 * 32 == int(prediction.evaluations.sum())
    assert sum(jobs for jobs, tokens in sizes if tokens == 5) == 2 * 4 * 4
    assert len(sizes) == 32 // 16 + 32 // 16, "16 jobs at once, whichever image they are of"


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("kind", ["dropping", "two-sign"])
def test_votes_are_the_pseudocode(kind: str, threshold: float | None) -> None:
    model: SplitModel = dropping() if kind == "dropping" else two_sign()
    voting = Voting(Ablation(width=3, stride=2), threshold)
    defense = Defense(model, PatchThreat.square(2, model.image), operation=voting)
    pixels = images(model, 10, seed=3)
    pixels[4:] = pixels[4:].mean((2, 3), keepdim=True) + 0.02 * pixels[4:]  # bands that look alike vote alike
    pixels = pixels.clamp(0, 1)
    prediction = defense.predict(pixels)
    plain = [reference.vote(model, image, defense.masks, threshold) for image in pixels]
    assert prediction.labels.tolist() == plain
    certificate = defense.certify(pixels, prediction.labels)
    wanted = [
        reference.certify_vote(model, image, defense.masks, int(y), threshold)
        for image, y in zip(pixels, prediction.labels, strict=True)
    ]
    assert certificate.certified.tolist() == wanted
    assert any(wanted) and not all(wanted)


@pytest.mark.parametrize("kind", ["dropping", "two-sign"])
def test_random_patches_change_no_certified_label(kind: str) -> None:
    model: SplitModel = dropping() if kind == "dropping" else two_sign()
    defense = Defense(model, PatchThreat.square(3, model.image), operation=Voting(Ablation(width=3)))
    random = torch.Generator().manual_seed(0)
    pixels = images(model, 12, seed=4)
    pixels = (pixels.mean((2, 3), keepdim=True) + 0.02 * pixels).clamp(0, 1)
    labels = defense.predict(pixels).labels
    proof = defense.certify(pixels, labels)
    certified = pixels[proof.certified]
    before = defense.predict(certified).votes
    changed = 0
    for _ in range(10):
        row = int(torch.randint(model.image.height - 2, (), generator=random))
        col = int(torch.randint(model.image.width - 2, (), generator=random))
        patched = certified.clone()
        patched[..., row : row + 3, col : col + 3] = torch.rand(len(certified), 3, 3, 3, generator=random).round()
        answer = defense.predict(patched)
        assert torch.equal(answer.labels, labels[proof.certified])
        changed += int((answer.votes != before).sum())
    assert len(certified) >= 3 and changed > 10, (len(certified), changed)
