"""Draw the pictures of docs/pictures: what each family hides and what it keeps, from the library's own masks.

python scripts/draw_docs.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from patchcure import Box, Grid, PatchThreat, build
from patchcure.ablations import Ablation
from patchcure.masks import MaskSet

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
KEPT, HIDDEN, PATCH = "#dbe7f3", "#33475b", "#d1495b"


def panel(axes: Axes, hidden: Tensor, title: str, patch: Box | None = None) -> None:
    """Kept and hidden cells, and the cells that the patch owns."""
    axes.imshow(hidden.float(), cmap=ListedColormap([KEPT, HIDDEN]), vmin=0, vmax=1, interpolation="nearest")
    height, width = hidden.shape
    if height * width < 1000:
        axes.set_xticks([x - 0.5 for x in range(width)], minor=True)
        axes.set_yticks([y - 0.5 for y in range(height)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    if patch is not None:
        corner = (patch.left - 0.5, patch.top - 0.5)
        axes.add_patch(
            Rectangle(corner, patch.width, patch.height, fill=False, edgecolor=PATCH, linewidth=2.2, zorder=5)
        )
    axes.set_title(title, fontsize=8)


def draw(
    name: str, hidden: Sequence[Tensor], titles: Sequence[str], patch: Box | None, owned: str, rows: int = 1
) -> None:
    """One picture of several panels with a legend."""
    columns = -(-len(hidden) // rows)
    shape = hidden[0].shape
    side = 1.45
    size = (side * columns, side * rows * min(1.2, shape[0] / shape[1]) + 0.35 * rows + 0.35)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axes, cells, title in zip(grid.flat, hidden, titles, strict=True):
        panel(axes, cells, title, patch)
    legend = [Patch(color=KEPT, label="kept"), Patch(color=HIDDEN, label="hidden")]
    legend += [Patch(facecolor="none", edgecolor=PATCH, linewidth=2, label=owned)]
    figure.legend(handles=legend, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1), h_pad=0.6, w_pad=0.5)
    figure.savefig(FOLDER / f"{name}.png", dpi=110)
    plt.close(figure)


def masking() -> None:
    """PCURE-ViT2x2 (7x7 windows of 2x2 tokens): single masks and a pair."""
    with torch.device("meta"):
        defense = build("PCURE-ViT2x2-k9")
    masks = defense.masks
    patch = defense.model.corrupted(Box(70, 100, 102, 132))
    cells = masks.masks.index((patch,))
    other = len(masks) - 1
    shown = [torch.zeros_like(masks.hidden[0]), *(masks.hidden[i] for i in (0, cells, other))]
    shown += [masks.hidden[0] | masks.hidden[other], masks.hidden[cells] | masks.hidden[other]]
    titles = ["features", "P(0)", "P(i): sees no patch", f"P({other})", f"P(0, {other})", f"P(i, {other})"]
    draw("masking", shown, titles, patch, "cells that a 32-pixel patch owns", rows=2)


def cleanser() -> None:
    """Six masks on each axis of 224 pixels."""
    threat = PatchThreat.square(32, 224).on_features(Grid(224, 224), lambda box: box)
    masks = MaskSet.covering(threat, per_axis=6)
    patch = Box(100, 40, 132, 72)
    covering = [i for i, (box,) in enumerate(masks.masks) if box.contains(patch)]
    chosen = [0, covering[0], 35]
    shown = [masks.hidden[i] for i in chosen] + [masks.hidden[covering[0]] | masks.hidden[35]]
    draw("pixels", shown, ["mask 0", "a mask over the patch", "mask 35", "a pair"], patch, "the patch")


def voting() -> None:
    """Bands of 5 columns at every 4th of 22 columns; the last one wraps."""
    grid = Grid(6, 22)
    threat = PatchThreat.rectangles([(2, 4)], grid).on_features(grid, lambda box: box)
    masks = Ablation(width=5, stride=4).masks(threat)
    patch = Box(2, 2, 4, 6)
    touched = [not bool(rows[patch.top : patch.bottom, patch.left : patch.right].all()) for rows in masks.hidden]
    titles = [f"start {4 * i}{': touched' if hit else ''}" for i, hit in enumerate(touched)]
    draw("voting", list(masks.hidden), titles, patch, "the patch", rows=2)


def local() -> None:
    """BagNet33: what the patch owns, and windows."""
    with torch.device("meta"):
        defense = build("PatchGuard-BagNet33")
    owned = defense.model.corrupted(Box(90, 60, 122, 92))
    masks = defense.masks
    over = [i for i, (box,) in enumerate(masks.masks) if box.contains(owned)]
    chosen = [0, over[0], len(masks) - 1]
    shown = [torch.zeros_like(masks.hidden[0]), *(masks.hidden[i] for i in chosen)]
    titles = ["local logits", "window 0", "a window over R", f"window {chosen[-1]}"]
    draw("local-logits", shown, titles, owned, "R, the cells that the patch owns")


def detection() -> None:
    """ViP: windows of tokens."""
    with torch.device("meta"):
        defense = build("ViP-detect")
    owned = defense.model.corrupted(Box(90, 60, 122, 92))
    masks = defense.masks
    over = masks.masks.index((owned,))
    shown = [masks.hidden[0], masks.hidden[1], masks.hidden[over], torch.zeros_like(masks.hidden[0])]
    draw("detection", shown, ["P(0)", "P(1)", "P(i): sees no patch", "f(x)"], owned, "tokens that the patch owns")


def bounds() -> None:
    """Two locations of a patch on 12x12 pixels: nothing is hidden, but inside it every value is possible."""
    hidden = []
    for top, left in ((0, 0), (3, 5), (7, 7)):
        free = torch.zeros(12, 12, dtype=torch.bool)
        free[top : top + 5, left : left + 5] = True
        hidden.append(free)
    figure, grid = plt.subplots(1, 3, figsize=(4.6, 2.1), squeeze=False)
    for axes, cells, title in zip(
        grid.flat, hidden, ("location (0, 0)", "location (3, 5)", "location (7, 7)"), strict=True
    ):
        panel(axes, cells, title)
    legend = [Patch(color=KEPT, label="the image's own value"), Patch(color=HIDDEN, label="anything in [0, 1]")]
    figure.legend(handles=legend, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(FOLDER / "bounds.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for family in (masking, cleanser, voting, local, detection, bounds):
        family()
