"""The hidden folder beside a destination in which a conversion works, and the step that puts it in place."""

import os
import shutil
from pathlib import Path

from nibblelm.checkpoint import journal
from nibblelm.checkpoint.writer import typed_write_errors
from nibblelm.errors import ConvertError


class WorkFolder:
    """`.NAME.partial` beside the destination NAME. As a context it is removed again if nothing was finished in it.

    source     the folder that is read, which must not be the destination
    resume     go on with a work folder that is there; otherwise one with finished units is refused, so that hours of
               work are not lost by forgetting a flag
    overwrite  a model folder at the destination is replaced at the end; a work folder is started afresh
    needed     bytes that will be written
    """

    def __init__(self, destination: Path, source: Path, resume: bool, overwrite: bool, needed: int) -> None:
        self._destination = Path(os.path.realpath(destination))
        _check_destination(self._destination, Path(os.path.realpath(source)), overwrite)
        self.path = self._destination.with_name(f".{self._destination.name}.partial")
        self._replaced = self._destination.with_name(f".{self._destination.name}.replaced")
        self._journal = journal.locked(self.path)
        try:
            _check_destination(self._destination, Path(os.path.realpath(source)), overwrite)  # nobody else makes it now
            self._prepare(destination, resume, overwrite, needed)
        except BaseException:
            self._journal.close()
            raise

    def _prepare(self, destination: Path, resume: bool, overwrite: bool, needed: int) -> None:
        finished = len(journal.parse_lines(self.path / journal.NAME)[0]) > 1
        if finished and not resume and not overwrite:
            raise ConvertError(
                f"an unfinished conversion to {destination} is in {self.path}: go on with --resume, or start again "
                "with --overwrite (in Python resume=True or overwrite=True)"
            )
        if not (resume and finished):
            with typed_write_errors(self.path):
                for entry in self.path.iterdir():
                    if entry.name != journal.NAME:
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                self._journal.truncate(0)
        held = sum(entry.stat().st_blocks * 512 for entry in os.scandir(self.path))
        free = shutil.disk_usage(self.path).free
        if free + held < needed:
            self._remove_if_unused()
            raise ConvertError(
                f"{destination} needs {(needed - held) / 1e6:.1f} MB more and {free / 1e6:.1f} MB are free on its disk"
            )

    def __enter__(self) -> "WorkFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_if_unused()
        self._journal.close()

    def _remove_if_unused(self) -> None:
        if self.path.exists() and len(journal.parse_lines(self.path / journal.NAME)[0]) < 2:
            shutil.rmtree(self.path, ignore_errors=True)

    def commit(self) -> None:
        """Rename the finished folder to the destination. What it replaces is deleted only after that."""
        with typed_write_errors(self._destination):
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
            replacing = self._destination.exists() and any(self._destination.iterdir())
            if replacing:
                self._destination.rename(self._replaced)
            try:
                self.path.rename(self._destination)
            except OSError:
                if replacing:
                    self._replaced.rename(self._destination)
                raise
            (self._destination / journal.NAME).unlink()
            _sync_folder(self._destination)
            _sync_folder(self._destination.parent)
            if replacing:
                shutil.rmtree(self._replaced)


def _check_destination(destination: Path, source: Path, overwrite: bool) -> None:
    if destination == source or source.is_relative_to(destination):
        raise ConvertError(f"{destination} is the source or holds it; name another folder for the result")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ConvertError(f"{destination} is a file; name a folder for the result")
    if destination.is_mount():
        raise ConvertError(
            f"{destination} is a mount point and cannot be put in place in one step; name a folder in it"
        )
    entries = list(destination.iterdir())
    if not entries:
        return
    if not overwrite:
        raise ConvertError(
            f"{destination} exists already; give --overwrite (in Python overwrite=True) to replace it once the new one "
            "is complete"
        )
    names = {entry.name for entry in entries}
    weights = any(name.endswith(".safetensors") for name in names)
    others = any(entry.is_dir() and not _holds_templates(entry) for entry in entries)
    if "config.json" not in names or not weights or others:
        raise ConvertError(
            f"{destination} is not just a model folder (config.json, safetensors, no sub-folders but of chat "
            "templates), so it is not overwritten; move it away or name another folder"
        )


def _holds_templates(folder: Path) -> bool:
    """Whether it is the one sub-folder that a conversion makes."""
    parts = list(folder.iterdir())
    return bool(parts) and all(part.suffix == ".jinja" for part in parts)


def _sync_folder(folder: Path) -> None:
    """Make renames durable; not every system can open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
