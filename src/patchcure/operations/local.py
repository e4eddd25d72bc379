"""What operations on local logits share: the cells' evidence, what an attacker may own, and the certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from patchcure.certificate import Certificate, Prediction
from patchcure.geometry import Interval
from patchcure.masks import Coverage, MaskSet
from patchcure.models.base import SplitModel
from patchcure.operations.base import bisect_sides, location_maps, suspicion, tolerance
from patchcure.threat import FeatureThreat, PatchThreat

Lead = Callable[[Bool[Tensor, "g cells"]], Float[Tensor, " g"]]
"""For one clean image: how far the true label stays ahead of every other one, whatever an attacker who owns these
cells writes into them. Above zero: it wins, clear of rounding. To own fewer cells never lessens it."""

TOGETHER = 1024
"""How many sets of owned cells are looked at together; bounds the memory."""

SUMS = 1 << 23
"""How many sums outside windows are held at once; bounds the memory."""


def local_logits(model: SplitModel, features: Tensor) -> Float[Tensor, "b cells classes"]:
    """u[cell, class], all finite."""
    local = model.local_logits(features)
    if not bool(local.isfinite().all()):
        raise FloatingPointError(
            "A local logit is NaN or infinite, so there is no label to trust: check the weights and the input's range."
        )
    return local


def rounding(local: Float[Tensor, "cells classes"]) -> Float[Tensor, " cells"]:
    """How far the logits of each cell may be from themselves when they are computed in another batch."""
    return tolerance(local).double()


def sum_rounding(local: Float[Tensor, "cells classes"]) -> Float[Tensor, ""]:
    """How far a sum of local logits over any of the cells may be from itself when it is computed in another batch.

    Each of the n terms moves by its `rounding`, and n - 1 additions in any order move the sum by at most n units of
    rounding of the sum of the terms' sizes.
    """
    largest = local.abs().amax(1).double()
    return (rounding(local) + len(local) * torch.finfo(local.dtype).eps * largest).sum()


def outside(
    values: Float[Tensor, "b cells classes"], windows: Bool[Tensor, "m cells"]
) -> Iterator[Float[Tensor, "part m classes"]]:
    """The sums over the cells outside each window, a few images at a time; never as the total minus the window.

    What is in a window cannot leak: it is finite, finite times zero is exactly zero, and adding zero changes no sum.

    >>> values, windows = (
    ...     torch.tensor([[[1.0], [2.0], [3e38]]]),
    ...     torch.tensor([[False, False, True], [True, False, True]]),
    ... )
    >>> torch.cat(list(outside(values, windows)))
    tensor([[[3.],
             [2.]]])
    """
    shown = (~windows).to(values.dtype)
    for part in values.split(max(1, SUMS // (len(windows) * values.shape[2]))):
        yield shown @ part


def without_owned(values: Float[Tensor, "cells classes"], owned: Bool[Tensor, "g cells"]) -> Float[Tensor, "g classes"]:
    """The sum over the cells that are not owned; for certificates, which see clean values only, in double precision.

    >>> without_owned(torch.tensor([[1.0], [2.0], [4.0]]).double(), torch.tensor([[True, False, True], [False] * 3]))
    tensor([[2.],
            [7.]], dtype=torch.float64)
    """
    counts = owned.sum(1)
    bags = torch.nn.functional.embedding_bag(owned.nonzero()[:, 1], values, counts.cumsum(0) - counts, mode="sum")
    return values.sum(0) - bags


def windows_of(masks: MaskSet, device: torch.device) -> Bool[Tensor, "m cells"]:
    """The cells of each window."""
    return masks.hidden.flatten(1).to(device)


@lru_cache(maxsize=64)
def ownership(threat: FeatureThreat) -> Coverage:
    """Every distinct set of cells that the patches may own, with the placements that own it.

    Written as the coverage by the masks that hide all cells but one: such a mask hides the patches exactly if they do
    not own its cell. So ``~ownership(threat).covers`` has one row for each distinct set, true where a cell is owned:
    the corrupted boxes themselves, and their unions for several patches.

    >>> from patchcure import Grid
    >>> threat = PatchThreat.square(2, image=4).on_features(Grid(2, 2), lambda box: box.intersect(Grid(2, 2).box))
    >>> (~ownership(threat).covers).sum(1)
    tensor([0, 4, 2, 2, 1])
    """
    spans = [[_distinct(intervals) for intervals in (f.rows, f.cols)] for f in threat.footprints]
    corners = [
        np.stack(np.broadcast_arrays(*rows.T[:, :, None], *cols.T[:, None, :]), -1) for (rows, _), (cols, _) in spans
    ]
    boxes = np.concatenate([corner.reshape(-1, 4) for corner in corners])
    boxes[(boxes[:, 0] >= boxes[:, 1]) | (boxes[:, 2] >= boxes[:, 3])] = 0
    boxes, box_of = np.unique(boxes, axis=0, return_inverse=True)
    maps, start = [], 0
    for corner, ((_, row_of), (_, col_of)) in zip(corners, spans, strict=True):
        stop = start + corner.shape[0] * corner.shape[1]
        maps.append(torch.from_numpy(box_of.reshape(-1)[start:stop].reshape(corner.shape[:2])[row_of[:, None], col_of]))
        start = stop
    rows, cols = np.arange(threat.grid.height), np.arange(threat.grid.width)
    in_rows = (boxes[:, :1] <= rows) & (rows < boxes[:, 1:2])
    in_cols = (boxes[:, 2:3] <= cols) & (cols < boxes[:, 3:])
    owned = (in_rows[:, :, None] & in_cols[:, None, :]).reshape(len(boxes), -1)
    others = list(combinations_with_replacement(range(len(boxes)), threat.count - 1))
    members = np.array([(box, *rest) for box in range(len(boxes)) for rest in others])
    together = owned[members[:, 0]]
    for column in members.T[1:]:
        together = together | owned[column]
    return Coverage(torch.from_numpy(~together), torch.from_numpy(members[:, 0]), tuple(maps), bare=None)


def _distinct(intervals: Sequence[Interval]) -> tuple[Int[np.ndarray, "u 2"], Int[np.ndarray, " n"]]:
    """The distinct intervals, and which of them each interval is."""
    values, inverse = np.unique(np.asarray(intervals), axis=0, return_inverse=True)
    return values, inverse.reshape(-1)


def certify_owned(
    leads: Sequence[Lead], model: SplitModel, masks: MaskSet, threat: PatchThreat, device: torch.device
) -> Certificate:
    """Certify each image by its `Lead`.

    * strict: the lead is above zero when the attacker owns any one of the windows (the papers' condition);
    * certified: it is above zero when the attacker owns exactly what a placement of the patches corrupts.

    Strict implies certified: the windows cover the threat, and to own fewer cells never lessens the lead.
    """
    coverage = ownership(masks.threat)
    safe = torch.stack([_leads(lead, ~coverage.covers, device) > 0 for lead in leads])
    margin = torch.stack([_leads(lead, masks.hidden.flatten(1), device) for lead in leads])
    strict = (margin > 0).all(1)
    sides: dict[int, Bool[Tensor, "g cells"]] = {0: torch.zeros(1, model.grid.cells, dtype=torch.bool, device=device)}

    def certified(side: int, asked: Bool[Tensor, " b"]) -> Bool[Tensor, " asked"]:
        if side not in sides:
            sides[side] = ~ownership(threat.with_squares(side).on_features(model.grid, model.corrupted)).covers
        chosen = [lead for lead, wanted in zip(leads, asked.tolist(), strict=True) if wanted]
        return torch.stack([(_leads(lead, sides[side], device) > 0).all() for lead in chosen])

    none = torch.zeros(len(leads), dtype=torch.long, device=device)
    possible = certified(0, torch.ones_like(none, dtype=torch.bool))
    high = torch.where(possible, min(threat.image.height, threat.image.width), none)

    return Certificate(
        certified=safe.all(1),
        strict=strict,
        margin=margin.amin(1),
        failed=torch.where(strict, -1, margin.argmin(1))[:, None].expand(-1, 2),
        safe=location_maps(safe, coverage),
        largest_patch=bisect_sides(certified, none, high),
    )


def window_prediction(
    labels: Int[Tensor, " b"],
    votes: Int[Tensor, "b m"],
    reference: Int[Tensor, " b"],
    alarm: Bool[Tensor, " b"],
    model: SplitModel,
    masks: MaskSet,
) -> Prediction:
    """The answer of a rule that takes one window away at a time; `votes` are the labels without each window."""
    disagreeing = votes != reference[:, None]
    return Prediction(
        labels=labels,
        unanimous=~disagreeing.any(1),
        votes=votes,
        disagreeing=disagreeing,
        suspicion=tuple(suspicion(model, masks, row) for row in disagreeing),
        evaluations=torch.full_like(labels, model.grid.cells),
        alarm=alarm,
    )


def _leads(lead: Lead, owned: Bool[Tensor, "g cells"], device: torch.device) -> Float[Tensor, " g"]:
    return torch.cat([lead(part.to(device)) for part in owned.split(TOGETHER)])
