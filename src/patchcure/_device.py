"""A device that can be used, or one clear line."""

from __future__ import annotations

import torch


def usable(device: str) -> torch.device:
    """The device of that name, after something was put there.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        where = torch.device(device)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"device: {device} cannot be used here ({reason}); cpu always can.") from error
    return where
