"""One figure that shows how a defense decided: the image, the votes under masks, the verdict, the certificate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import ALARM, Certificate, Prediction
from patchcure.defense import Defense
from patchcure.geometry import Box
from patchcure.operations.base import masked_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MOST = 12
"""So many masks are shown for each round; of more, the most informative."""
PER_LINE = 8
GOOD, BAD, MARK = "#1b7f3b", "#c62828", "#1565c0"
"""The right label, another label, what is hidden or suspected."""
LONG = 18
"""So many letters of a class's name are shown."""


@dataclass(frozen=True)
class _Story:
    """Everything that the figure tells, computed before anything is drawn.

    Args:
        label: the true one, if it is known.
        unmasked: what the model says when nothing is hidden.
        decider: the disagreeing mask that the second round is shown for, if there is one.
        seconds: the labels under that mask and each other one.
    """

    defense: Defense
    image: Float[Tensor, "c h w"]
    label: int | None
    prediction: Prediction
    unmasked: int
    decider: int | None
    seconds: Int[Tensor, " m"] | None
    names: Sequence[str] | None

    @property
    def verdict(self) -> int:
        return int(self.prediction.labels[0])

    def say(self, label: int) -> str:
        if label == ALARM:
            return "alarm"
        name = str(label) if self.names is None else self.names[label]
        return name if len(name) <= LONG else f"{name[: LONG - 1]}…"

    def colour(self, label: int) -> str:
        return GOOD if label == (self.verdict if self.label is None else self.label) else BAD


def picture(
    defense: Defense,
    image: Float[Tensor, "c h w"],
    path: str | Path,
    *,
    clean: Float[Tensor, "c h w"] | None = None,
    label: int | None = None,
    names: Sequence[str] | None = None,
) -> Prediction:
    """Write a figure (PNG, PDF or SVG, by the name) of how a defense decides on one image, perhaps an attacked one.

    Args:
        clean: the image before the attack; shown beside it, with the changed pixels outlined.
        label: the true label; with it the certificate of the clean image is shown (of `image` if there is no other).
        names: the classes' names, instead of their numbers.

    Frames and labels are green where the model says `label` (without one: the final answer), red elsewhere.

    >>> import tempfile
    >>> from patchcure import AnyClassifier, PatchThreat
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> model = AnyClassifier(network, image=8, num_classes=10)
    >>> defense = Defense(model, PatchThreat.square(2, image=8)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prediction = picture(defense, torch.rand(3, 8, 8), f"{folder}/decision.png")
    >>> prediction.votes.shape
    torch.Size([1, 49])
    """
    path = Path(path)
    story = _story(defense, image, label, names)
    certificate = None
    if label is not None:
        certificate = defense.certify((image if clean is None else clean)[None], torch.tensor([label]))
    figure = _draw(story, clean, certificate)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=150)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return story.prediction


@torch.no_grad()
def _story(defense: Defense, image: Tensor, label: int | None, names: Sequence[str] | None) -> _Story:
    prediction = defense.predict(image[None])
    unmasked = int(defense(image[None]).argmax(1))
    disagreeing = prediction.disagreeing[0].nonzero()[:, 0].tolist()
    if defense.operation.together < 2 or not disagreeing:
        return _Story(defense, image, label, prediction, unmasked, None, None, names)
    features = defense.model.features(image[None])
    every = torch.arange(len(defense.masks), device=image.device)
    only = torch.zeros_like(every)  # the one image
    rows = {i: masked_labels(defense.model, features, defense.masks, only, only + i, every).cpu() for i in disagreeing}
    winners = [mask for mask, row in rows.items() if bool((row == prediction.labels[0].cpu()).all())]
    decider = (winners or disagreeing)[0]
    return _Story(defense, image, label, prediction, unmasked, decider, rows[decider], names)


def _draw(story: _Story, clean: Tensor | None, certificate: Certificate | None) -> Figure:
    from matplotlib.figure import Figure

    shown = _informative(story)
    lines = -(-len(shown) // PER_LINE)
    rounds = 0 if not shown else 1 if story.seconds is None else 2  # some rules look at no masks
    heights = [3.0] + [0.5 + 1.4 * lines] * rounds
    figure = Figure(figsize=(9.6, sum(heights)), layout="constrained")
    top, *others = figure.subfigures(1 + rounds, 1, height_ratios=heights, squeeze=False)[:, 0]
    _overview(top, story, clean, certificate)
    for band, chosen in zip(others, (None, story.decider), strict=False):
        _round(band, story, shown, chosen)
    return figure


def _overview(band: SubFigure, story: _Story, clean: Tensor | None, certificate: Certificate | None) -> None:
    panels = 2 + (clean is not None) + (certificate is not None)
    axes = list(band.subplots(1, panels, squeeze=False)[0])
    if clean is not None:
        label = "" if story.label is None else f", labelled\n{story.say(story.label)}"
        _show(axes.pop(0), clean, f"Clean image{label}")
    before, after = axes[:2]
    what = "Image" if clean is None else "Attacked image"
    _show(before, story.image, f"{what}, undefended:\n{story.say(story.unmasked)}", story.colour(story.unmasked))
    if clean is not None and bool((changed := (clean != story.image).any(0)).any()):
        _mark(before, _hull(changed), fill=False, edgecolor=BAD, linewidth=2)
        before.set_xlabel("red box: the patch", fontsize=9)
    _show(after, story.image, f"With the defense:\n{story.say(story.verdict)}", story.colour(story.verdict))
    if (box := story.prediction.suspicion[0]) is not None:
        _mark(after, box, fill=False, edgecolor=MARK, linewidth=2, linestyle="--")
        after.set_xlabel("dashed: suspected patch", fontsize=9)
    if certificate is not None:
        _safety(axes[2], certificate, "clean image" if clean is not None else "image")


def _round(band: SubFigure, story: _Story, shown: Sequence[int], chosen: int | None) -> None:
    """One panel for each mask: what is hidden, and the label; with `chosen`, what is hidden beside that mask."""
    votes = story.prediction.votes[0].cpu() if chosen is None or story.seconds is None else story.seconds
    band.suptitle(_headline(story, votes, chosen), fontsize=11, x=0.01, ha="left", weight="bold")
    lines = -(-len(shown) // PER_LINE)
    axes = band.subplots(lines, -(-len(shown) // lines), squeeze=False).flatten()
    masks = story.defense.masks.masks
    for axis, mask in zip(axes, shown, strict=False):
        vote = int(votes[mask])
        _show(axis, story.image, story.say(vote), story.colour(vote))
        for box in masks[mask] + (() if chosen is None else masks[chosen]):
            pixels = story.defense.model.receptive(box)
            _mark(axis, pixels, facecolor="#90caf9", edgecolor=MARK, hatch="///", linewidth=0.5)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()


def _headline(story: _Story, votes: Int[Tensor, " m"], chosen: int | None) -> str:
    """What a round found, in words."""
    total = len(votes)
    some = f" ({MOST} of {total} shown)" if total > MOST else ""
    if chosen is None:
        counts = votes.bincount()
        ranked = [label for label in counts.argsort(descending=True, stable=True).tolist() if counts[label]]
        said = ", ".join(f"{story.say(label)} ({int(counts[label])}x)" for label in ranked[:4])
        return f"First round: predict with one mask. Votes: {said}{', ...' if len(ranked) > 4 else ''}{some}"
    label = int(story.prediction.votes[0, chosen])
    same = int((votes == label).sum())
    found = f"All {total} say so too: it wins" if same == total else f"Only {same} of {total} say so too: it loses"
    return f"Second round: add each mask to one that said {story.say(label)}. {found}{some}"


def _informative(story: _Story) -> list[int]:
    """At most MOST masks, in order: first those that disagree in a round, then others spread over the image."""
    odd = story.prediction.disagreeing[0].cpu()
    if story.seconds is not None:
        odd = odd | (story.seconds != story.seconds.mode().values)
    masks = torch.cat([odd.nonzero()[:, 0], (~odd).nonzero()[:, 0]]).tolist()
    if len(masks) <= MOST:
        return sorted(masks)
    first = masks[: min(int(odd.sum()), MOST // 2)]
    others = [mask for mask in masks if mask not in first]
    spread = torch.linspace(0, len(others) - 1, MOST - len(first)).round().long().tolist()
    return sorted(first + [others[index] for index in spread])


def _safety(axis: Axes, certificate: Certificate, what: str) -> None:
    """Where the patch's corner may be without success, for the shape with the most dangerous places."""
    safe = min((shape[0].cpu() for shape in certificate.safe), key=lambda shape: float(shape.double().mean()))
    certified = bool(certificate.certified[0])
    from matplotlib.colors import ListedColormap

    axis.imshow(safe.numpy(), cmap=ListedColormap(["#ef9a9a", "#a5d6a7"]), vmin=0, vmax=1)
    axis.set_title(f"The {what} is\n{'certified' if certified else 'not certified'}", fontsize=10)
    axis.title.set_color(GOOD if certified else BAD)
    axis.set_xlabel(f"{int(safe.sum())} of {safe.numel()} places are safe", fontsize=9)
    if safe.numel() <= 400:
        for edge in range(1, max(safe.shape)):
            axis.axhline(edge - 0.5, color="white", linewidth=1)
            axis.axvline(edge - 0.5, color="white", linewidth=1)
        axis.set(xlim=(-0.5, safe.shape[1] - 0.5), ylim=(safe.shape[0] - 0.5, -0.5))
    axis.set_xticks([])
    axis.set_yticks([])


def _show(axis: Axes, image: Float[Tensor, "c h w"], title: str, colour: str = "black") -> None:
    pixels = image.detach().cpu().permute(1, 2, 0).numpy()
    axis.imshow(pixels if pixels.shape[2] == 3 else pixels.mean(2), cmap="gray_r", vmin=0, vmax=1)
    axis.set_title(title, color=colour, fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color(colour)
        spine.set_linewidth(1.0 if colour == "black" else 2.0)


def _mark(axis: Axes, box: Box, **style: Any) -> None:
    """Draw a box of pixels."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((box.left - 0.5, box.top - 0.5), box.width, box.height, **style))


def _hull(pixels: Bool[Tensor, "h w"]) -> Box:
    """The smallest box with all these pixels."""
    rows, cols = pixels.nonzero().T
    return Box(int(rows.min()), int(cols.min()), int(rows.max()) + 1, int(cols.max()) + 1)
