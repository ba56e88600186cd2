"""Who a model is: the same text for the same weights on every server, and for no others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def of_repository(name: str, revision: str) -> str:
    """Of a model that came from a hub, by the commit that it came from."""
    return f"{name}@{revision}"


def of_folder(folder: str) -> str:
    """Of a local folder: a digest of its configuration and of the contents of its weights.

    Weights are read once; their digests are kept in ~/.cache/forebay by path, size and time.
    OSError: a file cannot be read. ValueError: there are no weights.
    """
    names = sorted(n for n in os.listdir(folder) if n.endswith(_WEIGHTS))
    if not names:
        raise ValueError(f"{folder} has no weights ({', '.join(_WEIGHTS)})")
    whole = hashlib.sha256(b"forebay.model\x01")
    config = os.path.join(folder, "config.json")
    if os.path.exists(config):
        whole.update(_content(config))
    known = _Known()
    for name in names:
        whole.update(known.digest(os.path.join(folder, name)))
    known.save()
    return "sha256:" + whole.hexdigest()


def of_files(paths: Iterable[str]) -> bytes:
    """[32] digest over the contents of files, in the order of their names."""
    whole = hashlib.sha256(b"forebay.files\x01")
    for path in sorted(paths):
        whole.update(_content(path))
    return whole.digest()


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class _Known:
    """Digests of files that have not changed since."""

    def __init__(self) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.path = os.path.join(cache, "forebay", "weights.json")
        self.entries: dict[str, str] = {}
        self.changed = False
        try:
            with open(self.path) as file:
                self.entries = {str(k): str(v) for k, v in json.load(file).items()}
        except (OSError, ValueError, AttributeError):
            pass  # no cache yet, or a broken one: read the weights

    def digest(self, path: str) -> bytes:
        stat = os.stat(path)
        key = f"{os.path.realpath(path)}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in self.entries:
            self.entries[key] = _content(path).hex()
            self.changed = True
        return bytes.fromhex(self.entries[key])

    def save(self) -> None:
        if not self.changed:
            return
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            part = f"{self.path}.{os.getpid()}"
            with open(part, "w") as file:
                json.dump(self.entries, file)
            os.replace(part, self.path)
        except OSError:
            pass  # read again next time
