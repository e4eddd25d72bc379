"""Released checkpoints: every name builds, every layout loads, and the numbers are those of the released models."""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchcure
from patchcure.operations import DoubleMasking
from patchcure.zoo import released
from patchcure.zoo.checkpoint import fit, read

SHARED = Path(os.environ.get("PATCHCURE_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "released.json"
EXPECTED: dict[str, Any] = json.loads(SHARED.read_text()) if SHARED.is_file() else {}


def filled(key: str, shape: list[int]) -> Tensor:
    """The rule by which the expected numbers were made."""
    r = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(size=shape).astype(np.float32)
    if key.endswith("running_var"):
        return torch.from_numpy(1 + 0.1 * np.abs(r))
    if key.endswith("running_mean"):
        return torch.from_numpy(0.1 * r)
    if key.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if len(shape) < 2:
        return torch.from_numpy(1 + 0.1 * r if key.endswith("weight") else 0.02 * r)
    if key.endswith(("pos_embed", "cls_token")):
        return torch.from_numpy(0.5 * r)
    return torch.from_numpy((1.5 * r / np.sqrt(np.prod(shape[1:]))).astype(np.float32))


@pytest.mark.shared
@pytest.mark.skipif(not EXPECTED, reason="needs the development data")
@pytest.mark.parametrize("name", ["vitsrf14x2_masked", "vitsrf14x2_split9_masked", "bagnet17_masked"])
def test_numbers_of_the_released_models(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    file = tmp_path / f"{name}.pth.tar"
    torch.save({"state_dict": {key: filled(key, shape) for key, shape in expected["keys"].items()}, "epoch": 1}, file)
    defense = patchcure.load(file, patch=32, mask_stride=1, operation=DoubleMasking(reference="unmasked"))
    images = torch.from_numpy(np.random.RandomState(0).rand(4, 3, 224, 224).astype(np.float32))

    with torch.no_grad():
        logits = defense(images)
        assert logits.argmax(1).tolist() == expected["unmasked_label"]
        torch.testing.assert_close(
            logits[:, :8],
            torch.tensor(expected["unmasked_logits_first8"]),
            rtol=1e-5,
            atol=1e-5 * float(logits.abs().max()),
        )
        four = defense.masks.hidden[:4].repeat(4, 1, 1)
        masked = defense.model.logits(defense.model.features(images), torch.arange(4).repeat_interleave(4), four)
        torch.testing.assert_close(
            masked.view(4, 4, -1)[..., :8],
            torch.tensor(expected["mask_logits_first8"]),
            rtol=1e-5,
            atol=1e-5 * float(masked.abs().max()),
        )
    assert len(defense.masks) == expected["mask_count"]
    prediction = defense.predict(images)
    assert prediction.votes.tolist() == expected["mask_labels"]
    assert prediction.labels.tolist() == expected["released_prediction"]
    certificate = defense.certify(images, torch.tensor(expected["unmasked_label"]))
    assert certificate.strict.tolist() == expected["certified_for_unmasked_label"]
    assert certificate.certified.tolist() == expected["certified_for_unmasked_label"]


def released_layout(state: dict[str, Tensor], k: int, before: int, between: int) -> dict[str, Tensor]:
    """A hybrid as a pair of layer lists, with some nameless layers before the blocks and between blocks and head."""
    depth = 1 + max(int(m[1]) for m in (re.match(r"blocks\.(\d+)\.", key) for key in state) if m)
    layout = {}
    for key, value in state.items():
        if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", key):
            number = int(block[1])
            where = f"0.pre_layers.{number + before}" if number < k else f"1.post_layers.{number - k}"
            layout[f"{where}.{block[2]}"] = value
        elif key.startswith("patch_embed."):
            layout[f"0.pre_layers.0.{key.removeprefix('patch_embed.')}"] = value
        elif key.startswith("fc_norm."):
            layout[f"1.post_layers.{depth - k + between}.{key.removeprefix('fc_norm.')}"] = value
        elif key.startswith("head."):
            layout[f"1.post_layers.{depth - k + between + 2}.{key.removeprefix('head.')}"] = value
        else:
            layout[f"0.{key}"] = value
    return layout


@pytest.mark.parametrize("window", ["14x2", "14x1", "2x2"])
@pytest.mark.parametrize("k", range(13))
def test_every_split_loads_by_order_and_shape(window: str, k: int) -> None:
    name = f"PCURE-ViT{window}-k{k}"
    with torch.device("meta"):
        defense = patchcure.build(name, flavour="published", num_classes=100)
    state = defense.model.backbone.state_dict()
    for before, between in ((1, 1), (4, 1), (3, 2)):
        layout = released_layout(state, k, before, between)
        assert released.instance(f"vitsrf{window}_split{k}_masked.pth.tar", layout) == (
            name,
            {"flavour": "published", "num_classes": 100},
        )
        renamed = released.timm_layout(layout)
        assert {key: value.shape for key, value in renamed.items()} == {key: v.shape for key, v in state.items()}
        fit(defense.model, renamed, "test")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vitsrf14x2_masked", "PCURE-ViT14x2-k12"),
        ("vitsrf14x1_vanilla", "PCURE-ViT14x1-k12"),
        ("vitsrf2x2_masked", "PCURE-ViT2x2-k12"),
        ("vitlsrf14x2_masked", "PCURE-ViT-L-14x2-k24"),
        ("vitlsrf14x2_split12_masked", "PCURE-ViT-L-14x2-k12"),
        ("bagnet17_vanilla", "PCURE-BagNet17-k50"),
        ("bagnet33_masked", "PCURE-BagNet33-k50"),
        ("bagnet45_masked", "PCURE-BagNet45-k50"),
        ("resnet50_masked", "PatchCleanser-ResNet50"),
        ("mae_masked", "PatchCleanser-ViT-B"),
    ],
)
def test_what_a_file_name_means(file: str, name: str) -> None:
    assert released.instance(f"{file}.pth.tar", {})[0] == name
    with torch.device("meta"):
        defense = patchcure.build(name, flavour="published")
    fit(defense.model, defense.model.backbone.state_dict(), file)


def test_a_hybrid_file_gives_the_logits_of_its_blocks_in_order(tmp_path: Path) -> None:
    """Through the file, with the blocks renumbered as an older timm did, to the same logits."""
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = patchcure.build("PCURE-ViT2x2-k5", flavour="published", num_classes=7).model.backbone.state_dict()
    state = {key: filled(key, list(value.shape)) for key, value in empty.items()}
    torch.save(state, tmp_path / "plain.pth")
    torch.save(released_layout(state, 5, 1, 1), tmp_path / "vitsrf2x2_split5_masked.pth.tar")
    plain = patchcure.load("PCURE-ViT2x2-k5", weights=tmp_path / "plain.pth", flavour="published", num_classes=7)
    hybrid = patchcure.load(tmp_path / "vitsrf2x2_split5_masked.pth.tar")
    image = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(plain(image), hybrid(image))


class NotATensor:
    pass


def test_files_that_do_not_fit_say_why(tmp_path: Path) -> None:
    with torch.device("meta"):
        vit = patchcure.build("PCURE-ViT-Ti-14x2-k3").model.backbone.state_dict()
    state = {key: torch.zeros(value.shape) for key, value in vit.items()}
    wrong = tmp_path / "vitsrf14x2_split9_masked.pth.tar"
    torch.save(released_layout(state, 3, 4, 1), wrong)
    with pytest.raises(ValueError, match="named for a split at k = 9 but its first part holds 3 blocks"):
        patchcure.load(wrong)
    torch.save(released_layout(state, 9, 4, 1), wrong)
    with pytest.raises(ValueError, match="do not fit SplitViT: other shapes:"):
        patchcure.load(wrong)
    torch.save(state | {"surplus": torch.zeros(1)}, tmp_path / "surplus.pth")
    with pytest.raises(ValueError, match="it also has surplus"):
        patchcure.load("PCURE-ViT-Ti-14x2-k3", weights=tmp_path / "surplus.pth")
    torch.save({"model": [1, 2]}, tmp_path / "list.pth")
    with pytest.raises(ValueError, match="does not hold a dictionary of named tensors"):
        read(tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match="cannot be read as a PyTorch checkpoint"):
        read(tmp_path / "text.pth")
    torch.save({"state_dict": NotATensor()}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="cannot be read as a PyTorch checkpoint of plain tensors"):
        read(tmp_path / "code.pth")
    (tmp_path / "cut.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        patchcure.load(tmp_path / "cut.safetensors")
    with pytest.raises(FileNotFoundError, match="There are no weights at"):
        patchcure.load("vitsrf14x2_masked.pth.tar")
    torch.save(state, tmp_path / "mystery.pth.tar")
    with pytest.raises(ValueError, match="does not say which model it holds"):
        patchcure.load(tmp_path / "mystery.pth.tar")


def test_mae_pretraining_weights_load_into_any_vit(tmp_path: Path) -> None:
    """Decoder left out, position embeddings resampled, the head new and announced."""
    with torch.device("meta"):
        vit = patchcure.build("PCURE-ViT-Ti-14x2-k3").model.backbone.state_dict()
    torch.manual_seed(0)
    state = {key: torch.randn(value.shape) for key, value in vit.items() if not key.startswith(("head.", "fc_norm."))}
    state |= {"norm.weight": torch.ones(192), "norm.bias": torch.zeros(192), "mask_token": torch.zeros(1, 1, 512)}
    state |= {"decoder_embed.weight": torch.zeros(512, 192)}
    torch.save({"model": state, "args": None}, tmp_path / "mae_pretrain.pth")
    for name, size in (("PCURE-ViT-Ti-2x2-k6", 224), ("PCURE-ViT-Ti-2x1-k12", 128)):
        with pytest.warns(UserWarning, match=r"has no classifier: head\.bias, head\.weight are new"):
            defense = patchcure.load(
                name, weights=tmp_path / "mae_pretrain.pth", image_size=size, num_classes=3, patch=16
            )
        assert torch.equal(defense.model.backbone.blocks[5].attn.qkv.weight, state["blocks.5.attn.qkv.weight"])  # type: ignore[union-attr,index]
        assert defense(torch.rand(1, 3, size, size)).shape == (1, 3)
