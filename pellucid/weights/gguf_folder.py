"""The JSON files that a GGUF file stands for, written once into the user's cache.

Whoever wants config.json or a tokenizer then finds a folder, as of any other checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from pellucid.weights.gguf_model import GgufModel
from pellucid.weights.gguf_tokenizer import GgufTokenizer

VERSION = 2  # of what is written


def folder_of(file: Path) -> Path:
    """A folder with config.json, generation_config.json and, where the file has one, the tokenizer.

    Raises ValueError for a file that cannot be read, or of a model that is not known.
    """
    status = file.stat()
    identity = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = cache_root() / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if (folder / "config.json").is_file():
        return folder
    model = GgufModel(file)
    contents: dict[str, object] = {"config": model.config, "generation_config": model.generation_config}
    try:
        tokenizer = GgufTokenizer.read(model.metadata)
        contents |= {"tokenizer": tokenizer.tokenizer, "tokenizer_config": tokenizer.config}
    except ValueError as error:
        contents["no_tokenizer"] = {"reason": str(error)}
    return write_folder(folder, contents)


def cache_root() -> Path:
    """Where folders are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pellucid" / "gguf"


def write_folder(folder: Path, contents: dict[str, object]) -> Path:
    """Write each as a JSON file, all of them or none; in a place of its own if the cache takes none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:
        new = folder = Path(tempfile.mkdtemp(prefix="pellucid-gguf-"))
    for name, content in contents.items():
        (new / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if new != folder:
        try:
            new.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(new, ignore_errors=True)
    return folder
