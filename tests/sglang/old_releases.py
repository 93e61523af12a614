"""Other SGLang releases, imported beside the packages of the newest. Importing this module makes that possible; it is also a
pytest plugin, `-p tests.sglang.old_releases`. Nothing here is called by what the tests look at."""

from __future__ import annotations

import sys
import types
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


# Before 0.5.14 the host pools import their GPU copies without asking whether there is a GPU.
sys.modules.setdefault("sgl_kernel.kvcacheio", Anything("sgl_kernel.kvcacheio"))

# A release brings configurations of models that the transformers of a later one has itself.
_register = CONFIG_MAPPING.register
CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(key, value, exist_ok=True)
