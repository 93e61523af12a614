"""Which weights does this engine serve? A fingerprint that is the same on every host and differs between checkpoints.

A served name says what the operator calls a model, not which weights it is: pages computed with other weights are garbage.
The fingerprint covers the model's configuration and samples of its weight files, whatever folder they lie in.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_CONFIG_FILES = ("config.json", "quantize_config.json", "hf_quant_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MAX_FILES = 1024
_SAMPLES, _SAMPLE_BYTES = 4, 4096
_ARGUMENTS = ("quantization", "json_model_override_args", "weight_version")
"""Server arguments that change what the same files compute, or that say outright which weights these are."""


def of_engine() -> str:
    """Fingerprint of the weights that the SGLang process we are in serves; "" when it does not tell (older releases, tests)."""
    arguments = _server_args()
    model_path = getattr(arguments, "model_path", None)
    if not model_path:
        return ""
    sha = hashlib.sha256()
    for name in _ARGUMENTS:
        _frame(sha, f"{name}={getattr(arguments, name, None)}".encode())
    if getattr(arguments, "load_format", None) == "dummy":
        _frame(sha, b"dummy weights")
    folder = _folder(str(model_path), getattr(arguments, "revision", None))
    if folder is None:
        _frame(sha, f"{model_path}@{getattr(arguments, 'revision', None)}".encode())
        log.warning("the files of %s are not found here: its pages are told apart by that name and revision alone", model_path)
    else:
        try:
            _frame(sha, of_folder(folder).encode())
        except OSError as error:
            _frame(sha, str(model_path).encode())
            log.warning("cannot read the weights in %s (%s): its pages are told apart by that path alone", folder, error)
    return sha.hexdigest()[:32]


def of_folder(folder: Path) -> str:
    """Fingerprint of a checkpoint: its configuration files whole, and of each weight file its name, size and a few samples.
    Reads some KiB a file. Raises OSError."""
    sha = hashlib.sha256()
    for name in _CONFIG_FILES:
        path = folder / name
        if path.is_file():
            _frame(sha, name.encode())
            _frame(sha, path.read_bytes())
    weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    for path in weights[:_MAX_FILES]:
        size = path.stat().st_size
        _frame(sha, f"{path.name} {size}".encode())
        with path.open("rb", buffering=0) as file:
            for sample in range(_SAMPLES):
                os.lseek(file.fileno(), (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0, 0)
                _frame(sha, file.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def _frame(sha: Any, data: bytes) -> None:
    sha.update(len(data).to_bytes(8, "little"))
    sha.update(data)


def _server_args() -> Any:
    for module, function in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            return getattr(importlib.import_module(module), function)()
        except Exception:  # each release has one of them, and before an engine has started neither answers
            continue
    return None


def _folder(model_path: str, revision: str | None) -> Path | None:
    """The folder that a path, or a name in the local Hugging Face cache, stands for."""
    if os.path.isdir(model_path):
        return Path(model_path)
    if os.path.isfile(model_path):
        return Path(model_path).parent
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model_path, "config.json", revision=revision)
    except Exception:  # not installed, or a name that is no repository's
        return None
    return Path(cached).parent if isinstance(cached, str) else None
