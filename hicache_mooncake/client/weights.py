"""Which weights does this engine serve? A fingerprint that is the same on every host and differs between checkpoints.

A served name says what the operator calls a model, not which weights it is: pages computed with other weights are garbage.
The fingerprint covers the model's configuration and a sample of every tensor, whatever folder and files they lie in.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_CONFIG_FILES = ("config.json", "quantize_config.json", "hf_quant_config.json")
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
"""Looked at where there is no .safetensors: a folder may hold the same weights in several forms, or only in one."""
_MAX_TENSORS, _TENSOR_SAMPLE_BYTES = 2048, 512
_FILE_SAMPLES, _FILE_SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 100 << 20
_ARGUMENTS = ("quantization", "weight_version")
"""Server arguments that change what the same files compute, or that say outright which weights these are."""


def of_engine(model_path: str | None = None) -> str:
    """Fingerprint of the weights that the SGLang process we are in serves; "" when it does not tell (older releases, tests).
    `model_path`: from there instead, after an update of the weights."""
    arguments = server_args()
    loaded_at_start = model_path is None
    model_path = model_path or getattr(arguments, "model_path", None)
    if not model_path:
        return ""
    sha = hashlib.sha256()
    for name in _ARGUMENTS:
        _frame(sha, f"{name}={getattr(arguments, name, None)}".encode())
    _frame(sha, _canonical_json(getattr(arguments, "json_model_override_args", None)).encode())
    if getattr(arguments, "load_format", None) == "dummy":
        _frame(sha, b"dummy weights")
    scales = getattr(arguments, "quantization_param_path", None)
    if scales and os.path.isfile(scales):
        _frame(sha, Path(scales).read_bytes())
    place = _place(str(model_path), getattr(arguments, "revision", None))
    if place is None:
        _frame(sha, f"{model_path}@{getattr(arguments, 'revision', None)}".encode())
        log.warning("the files of %s are not found here: its pages are told apart by that name and revision alone", model_path)
    else:
        try:
            _frame(sha, of_files(place).encode())
            if loaded_at_start and _changed_since_start(place):
                _frame(sha, os.urandom(16))
                log.warning(
                    "the files in %s are newer than this process, which may have loaded others: pages are its own", place
                )
        except (OSError, ValueError) as error:
            _frame(sha, str(model_path).encode())
            log.warning("cannot read the weights in %s (%s): its pages are told apart by that path alone", place, error)
    return sha.hexdigest()[:32]


def of_draft() -> str:
    """Fingerprint of the draft model's weights, "" without one: of a draft's pool, or its layers in the target's."""
    path = getattr(server_args(), "speculative_draft_model_path", None)
    return of_engine(str(path)) if path else ""


def of_files(place: Path) -> str:
    """Fingerprint of a checkpoint, a folder or one file: its configuration, and a sample of every tensor (of .safetensors) or
    of each file all over (of other forms). How tensors are spread over files makes no difference.

    Reads some hundred KiB to a few MiB. Raises OSError, and ValueError for a damaged .safetensors.
    """
    sha = hashlib.sha256()
    folder = place if place.is_dir() else place.parent
    for name in _CONFIG_FILES:
        path = folder / name
        if path.is_file():
            _frame(sha, name.encode())
            _frame(sha, path.read_bytes())
    files = sorted(path for path in folder.iterdir() if path.is_file()) if place.is_dir() else [place]
    tensors = _indexed([path for path in files if path.suffix == ".safetensors"], folder)
    if tensors:
        _sample_tensors(sha, tensors)
    else:
        for path in files:
            if path.suffix in _OTHER_SUFFIXES or path == place:
                _sample_file(sha, path)
    return sha.hexdigest()


def _changed_since_start(place: Path) -> bool:
    files = [path for path in place.iterdir() if path.is_file()] if place.is_dir() else [place]
    wanted = (".safetensors", ".json", *_OTHER_SUFFIXES)
    newest = max((path.stat().st_mtime for path in files if path.suffix in wanted), default=0.0)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return newest > booted + ticks / os.sysconf("SC_CLK_TCK") + 1.0


def _indexed(files: list[Path], folder: Path) -> list[Path]:
    """Those that the model's index names, where it has one: a folder may hold a second copy under other names."""
    index = folder / "model.safetensors.index.json"
    if not files or not index.is_file():
        return files
    named = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
    return [path for path in files if path.name in named] or files


def _sample_tensors(sha: Any, files: list[Path]) -> None:
    tensors: list[tuple[str, str, Path, int, int]] = []
    for path in files:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"{path.name} is no .safetensors file")
            for name, about in json.loads(file.read(header_bytes)).items():
                if name != "__metadata__":
                    first, end = about["data_offsets"]
                    kind = f"{about['dtype']} {about['shape']}"
                    tensors.append((name, kind, path, 8 + header_bytes + first, end - first))
    tensors.sort(key=lambda tensor: tensor[0])
    step = -(-len(tensors) // _MAX_TENSORS)
    opened: dict[Path, int] = {}
    try:
        for number, (name, kind, path, at, size) in enumerate(tensors):
            _frame(sha, f"{name} {kind}".encode())
            if number % step == 0:
                fd = opened.setdefault(path, -1)
                if fd < 0:
                    fd = opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                _frame(sha, os.pread(fd, min(size, _TENSOR_SAMPLE_BYTES), at + max(0, size - _TENSOR_SAMPLE_BYTES) // 2))
    finally:
        for fd in opened.values():
            if fd >= 0:
                os.close(fd)


def _sample_file(sha: Any, path: Path) -> None:
    size = path.stat().st_size
    _frame(sha, f"{path.name} {size}".encode())
    with path.open("rb", buffering=0) as file:
        for sample in range(_FILE_SAMPLES):
            at = max(0, size - _FILE_SAMPLE_BYTES) * sample // (_FILE_SAMPLES - 1)
            _frame(sha, os.pread(file.fileno(), _FILE_SAMPLE_BYTES, at))


def _canonical_json(text: object) -> str:
    try:
        return json.dumps(json.loads(str(text or "{}")), sort_keys=True)
    except ValueError:
        return str(text)


def _frame(sha: Any, data: bytes) -> None:
    sha.update(len(data).to_bytes(8, "little"))
    sha.update(data)


def server_args() -> Any:
    """SGLang's arguments, of the engine that this process belongs to; None where there is none."""
    for module, function in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            return getattr(importlib.import_module(module), function)()
        except Exception:  # each release has one of them, and before an engine has started neither answers
            continue
    return None


def _place(model_path: str, revision: str | None) -> Path | None:
    """The folder or file that a path, or a name in the local Hugging Face cache, stands for."""
    if os.path.exists(model_path):
        return Path(model_path)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model_path, "config.json", revision=revision)
    except Exception:  # not installed, or a name that is no repository's
        return None
    return Path(cached).parent if isinstance(cached, str) else None
