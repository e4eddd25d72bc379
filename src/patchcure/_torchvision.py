"""A guard for torchvision builds that do not match torch."""

import importlib
import sys
from types import ModuleType

_REGISTRATIONS = "torchvision._meta_registrations"


def ensure_torchvision() -> None:
    """Import torchvision, even if its compiled operators are missing; call it before importing timm or torchvision.

    A CUDA build of torchvision beside a CPU build of torch fails at import ("operator torchvision::nms does not
    exist"), and timm with it. Only the module that describes those operators to torch is at fault: with an empty one
    in its place transforms, datasets and timm work. Nothing is changed on a healthy install. Worker processes that
    start afresh need the call as well.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        message = str(error)
        if "operator" not in message or "does not exist" not in message:
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules[_REGISTRATIONS] = ModuleType(_REGISTRATIONS)
        importlib.import_module("torchvision")
