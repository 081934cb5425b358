"""From what the user names, a folder or a hub id, to a folder on this machine."""

import re
from os import PathLike
from pathlib import Path

from nibblelm.checkpoint.json_object import shown
from nibblelm.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Pickles can run code when they are read, so they are not even fetched.
_WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken", "LICENSE*", "README*"]
# Sub-folders, but for chat templates, and Mistral's second copy of the weights.
_UNWANTED = [*(f"*/{pattern}" for pattern in _WANTED if pattern != "*.jinja"), "consolidated*"]


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `source` itself, or a snapshot in huggingface_hub's cache for an id "org/name".

    What is missing from the cache is fetched; without a network, what is there is used. `revision` is a branch, tag
    or commit. Raises CheckpointError when neither a folder nor a snapshot can be had.
    """
    if not isinstance(source, str | PathLike):
        raise CheckpointError(f"the model is {source!r:.60}; supported: the path of a folder, or a hub id")
    folder, name = Path(source), str(source)
    try:
        if name and folder.is_dir():
            if revision is not None:
                raise CheckpointError(f"{name} is a folder, which has no revision {revision!r}; it is one of a hub id")
            return folder
        exists = folder.exists()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    if name and exists:
        kind = "a GGUF file, for llama.cpp" if name.endswith(".gguf") else "a file"
        raise CheckpointError(f"{name} is {kind}; give the folder that holds config.json and the safetensors")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{shown(name)} is neither a folder nor a hub id such as 'org/name'")
    return _snapshot(name, revision)


def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second to import

    def download(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=local_files_only,
            )
        )

    try:
        return download(local_files_only=False)
    except Exception as online:  # whatever the network stack raises: no connection, no such repository, no access
        try:
            return download(local_files_only=True)
        except Exception:
            reason = str(online).strip().split("\n")[0]
            raise CheckpointError(
                f"{name!r} is not a folder here, not in the hub's cache, and cannot be fetched: "
                f"{type(online).__name__}: {reason}"
            ) from online
