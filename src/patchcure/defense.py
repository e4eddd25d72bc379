"""A defense: a model, a threat, masks that cover it, and a secure operation."""

from __future__ import annotations

from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from patchcure.certificate import Certificate, Prediction
from patchcure.masks import MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations import DoubleMasking, SecureOperation
from patchcure.operations.base import Detail, masks_for
from patchcure.threat import PatchThreat


class Defense(nn.Module):
    """A classifier whose labels no patch of the threat can change, wherever `certify` says so.

    Called like any module it gives the logits of the undefended model, for training and for attacks. A new defense is
    in evaluation mode.

    Args:
        model: a network that can be split.
        threat: what the attacker may do.
        masks: what to hide; by default what the operation asks for: masks at every cell that cover the threat, the
            ablations of a vote, or none.
        operation: how predictions under masks become a label.

    To compile it, replace the two halves of its model: ``model.features = torch.compile(model.features)``, and
    ``logits`` likewise.

    `recipe` holds the arguments of `patchcure.build` where that made the defense.

    >>> from patchcure import AnyClassifier, PatchThreat
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    >>> model = AnyClassifier(network, image=8, num_classes=10)
    >>> defense = Defense(model, PatchThreat.square(2, image=8))
    >>> defense
    Defense(AnyClassifier, one patch of 2x2 pixels anywhere on 8x8, 49 masks, DoubleMasking(reference='majority'))
    >>> images = torch.rand(4, 3, 8, 8)
    >>> prediction = defense.predict(images)
    >>> certificate = defense.certify(images, prediction.labels)
    >>> certificate.certified.shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: SplitModel,
        threat: PatchThreat,
        masks: MaskSet | None = None,
        operation: SecureOperation | None = None,
    ) -> None:
        super().__init__()
        if threat.target != model.image:
            raise ValueError(
                f"The model reads images of {model.image.height}x{model.image.width} but the threat ends on "
                f"{threat.target.height}x{threat.target.width} pixels: give both the same image size, or the threat a "
                "Resize to the model's size (PatchThreat.before)."
            )
        if any("quantized.dynamic" in type(module).__module__ for module in model.modules()):
            raise ValueError(
                "Dynamic quantisation is unsound here: its scale depends on the whole input, so a patch would reach "
                "every prediction under masks. Use the model as it was before it was quantised."
            )
        self.model = model
        self.recipe: dict[str, Any] | None = None
        self.threat = threat
        self.operation: SecureOperation = DoubleMasking() if operation is None else operation
        reach = threat.on_features(model.grid, model.corrupted)
        together = self.operation.together
        masks = masks or masks_for(self.operation, reach)
        # Built anew from the model's own geometry, so that masks made for another threat or model are refused.
        self.masks = MaskSet(masks.masks, reach, max(masks.together, together) if together else 0)
        self.eval()

    def __repr__(self) -> str:
        """One line; the layers are those of `model`."""
        name = self.recipe["name"] if self.recipe else type(self.model).__name__
        return f"Defense({name}, {self.threat.describe()}, {len(self.masks)} masks, {self.operation!r})"

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of the undefended model."""
        logits: Tensor = self.model(images)
        return logits

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "b c h w"]) -> Prediction:
        """The secure labels of images in [0, 1], with the evidence."""
        self._check(images)
        return self.operation.predict(self.model, self.model.features(images), self.masks)

    @torch.no_grad()
    def certify(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], detail: Detail = "locations"
    ) -> Certificate:
        """For each clean image with its true label: can any patch of the threat change the prediction?

        Args:
            images: clean images in [0, 1].
            labels: their true labels.
            detail: what the certificate tells of images that fail. ``"verdict"``: only that they fail, the fastest.
                ``"locations"``: at which locations, and the largest patch; exact. ``"margins"``: every margin too.
        """
        self._check(images)
        labels = torch.as_tensor(labels, device=images.device)
        if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"Expected one whole-number label for each of the {len(images)} images, got {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        classes = self.model.num_classes
        if bool(((labels < 0) | (labels >= classes)).any()):
            raise ValueError(f"Labels go from 0 to {classes - 1}, got {labels.min()} to {labels.max()}.")
        if detail not in get_args(Detail):
            raise ValueError(f"detail: expected one of {', '.join(get_args(Detail))}, got {detail!r}.")
        features = self.model.features(images)
        return self.operation.certify(self.model, features, self.masks, self.threat, labels.long(), detail)

    def _check(self, images: Tensor) -> None:
        model = self.model
        want = (len(model.mean), model.image.height, model.image.width)
        if images.ndim != 4 or tuple(images.shape[1:]) != want or not images.is_floating_point() or not len(images):
            raise ValueError(
                f"Expected a batch of float images (n, {want[0]}, {want[1]}, {want[2]}) with values in [0, 1], got "
                f"{images.dtype} of shape {tuple(images.shape)}."
            )
        if any(module.training for module in model.modules()):
            raise ValueError(
                "The model, or a part of it, is in training mode, where predictions are random or mix the images of a "
                "batch: call .eval() first."
            )
        if images.is_meta:
            raise ValueError(
                "Images on the meta device have no values, so there is nothing to predict or to certify: use real "
                "images, or patchcure.benchmark.gmacs to count the work."
            )
        low, high = images.aminmax()
        if not (bool(low >= 0) and bool(high <= 1)):
            raise ValueError(
                f"Images must be in [0, 1] without NaN, got values from {low.item():.3g} to {high.item():.3g}: divide "
                "bytes by 255, and leave normalisation to the model."
            )
