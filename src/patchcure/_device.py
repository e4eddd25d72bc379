"""A device that can be used, or one clear line; and what it is good at."""

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


def has_bfloat16(device: torch.device) -> bool:
    """Does this device multiply bfloat16 in hardware, so that mixed precision makes training faster?

    >>> has_bfloat16(torch.device("meta"))
    False
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # older torch does not tell
        return False
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))
