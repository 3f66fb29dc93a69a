"""Write and read checkpoints: directories of safetensors and JSON, complete or absent.

A checkpoint has ``model.safetensors`` (state_dict), a file for each other part with tensors,
``state.json`` (everything else) and ``manifest.json`` (size and digest of all others). Nothing is
unpickled. Handles tensors and files, not jobs.
"""

import json
import os
import re
import shutil
import struct
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from engine.core.safetensors_writer import described, pieces_of, read_tensors, write_file
from engine.core.snapshot import Snapshot, State, Stateful
from glasshouse import jsonio
from glasshouse.errors import CheckpointDamaged, CheckpointMismatch
from glasshouse.failpoints import failpoint

FORMAT = 3
_READ = (2, FORMAT)
"""Format 2 numbers the parameters of the optimizer and of averages; format 3 names them."""
MANIFEST = "manifest.json"
STATE = "state.json"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[a-z][a-z0-9_]*\.(safetensors|json)")


WriteTensors = Callable[[Path, Snapshot], dict[str, dict[str, Any]]]
"""Writes the tensors of a snapshot into a directory; returns what `write` does."""


def write_tensors(directory: Path, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Write a file for each part of a snapshot that has tensors; return what `write` does."""
    return {
        f"{part}{_SUFFIX}": write_file(directory / f"{part}{_SUFFIX}", pieces_of(tensors))
        for part, tensors in snapshot.tensors.items()
        if tensors
    }


def write(
    directory: Path, snapshot: Snapshot, write_tensors: WriteTensors = write_tensors
) -> dict[str, dict[str, Any]]:
    """Write a checkpoint; return each file's ``size_bytes`` and ``sha256``.

    ``write_tensors``: how the tensors are written; with several processes, by all of them.
    ``directory`` appears only when all its files are complete and on disk. After an error nothing
    is left of the new checkpoint, and an earlier one of that name is unchanged.

    Raises:
        OSError: the files cannot be written.
    """
    partial = _beside(directory, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        failpoint("checkpoint.write")
        files = _write_files(partial, snapshot, write_tensors)
        failpoint("checkpoint.written")
        _fsync(partial)
        _appear(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return files


def _write_files(
    directory: Path, snapshot: Snapshot, write_tensors: WriteTensors
) -> dict[str, dict[str, Any]]:
    snapshot.wait()
    files = write_tensors(directory, snapshot)
    whole = {"format": FORMAT, **snapshot.about, "parts": snapshot.rest}
    files[STATE] = _write_json(directory / STATE, whole)
    files[MANIFEST] = _write_json(directory / MANIFEST, dict(files))
    return files


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    return write_file(path, [json.dumps(jsonio.named(value), indent=1).encode()])


def _appear(partial: Path, directory: Path) -> None:
    """Rename a complete checkpoint; an older one is deleted only when the new one is durable."""
    replaced = _beside(directory, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    failpoint("checkpoint.rename")
    if directory.exists():
        directory.rename(replaced)
    try:
        partial.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    failpoint("checkpoint.renamed")
    _fsync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Clean up after a process that was killed while it wrote; complete checkpoints stay."""
    for path in parent.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".*.replaced"):
        owner = path.with_name(path.name[1:].removesuffix(".replaced"))
        if owner.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(owner)


def _beside(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{what}")


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files match its manifest."""

    about: dict[str, Any]
    """Metadata: step, epoch, spec, metrics …"""
    parts: MutableMapping[str, State]

    @property
    def step(self) -> int:
        """Number of updates done: the next step to run."""
        return int(self.about["step"])

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Restore all parts of a training run. Each part is removed from here when restored.

        Raises:
            CheckpointMismatch: the checkpoint belongs to something else.
        """
        if parts.keys() != self.parts.keys():
            have, need = sorted(self.parts), sorted(parts)
            raise CheckpointMismatch(f"The checkpoint holds {have}, and the job needs {need}.")
        for name, part in parts.items():
            try:
                part.restore(self.parts.pop(name))
            except (KeyError, TypeError, ValueError, RuntimeError) as cause:
                detail = f"The checkpoint's {name} does not fit the job: {cause!r}"
                raise CheckpointMismatch(detail[:500]) from cause


class _Parts(UserDict[str, State]):
    """The parts of a checkpoint. The tensors of a part are read when it is accessed.

    ``maps``: map the files into memory instead, for those who keep a part of each tensor.
    """

    def __init__(self, directory: Path, rest: dict[str, State], *, maps: bool) -> None:
        super().__init__(rest)
        self._directory = directory
        self._maps = maps

    def __getitem__(self, name: str) -> State:
        rest = self.data[name]
        path = self._directory / f"{name}{_SUFFIX}"
        if self._maps:
            return rest | _tensors(self._directory, name)
        try:
            return rest | (read_tensors(path) if path.exists() else {})
        except (OSError, ValueError, LookupError, TypeError, struct.error) as cause:
            raise CheckpointDamaged(f"The checkpoint cannot be read: {cause!r}") from cause


def read(directory: Path, *, maps: bool = False) -> Saved:
    """Read a checkpoint to resume from, and verify the digests of all its files.

    ``maps``: the caller copies what it keeps, so its memory need not hold whole tensors.

    Raises:
        CheckpointDamaged: files are missing, altered, or not of a checkpoint.
        CheckpointMismatch: it was written in an unsupported format.
    """
    about = read_state(directory)
    if about.get("format") not in _READ:
        detail = (
            f"The checkpoint has format {about.get('format')}; to resume from it takes {FORMAT}"
        )
        raise CheckpointMismatch(f"{detail}. Its weights can be used.")
    _check_files(directory)
    try:
        return Saved(about, _Parts(directory, about.pop("parts"), maps=maps))
    except (KeyError, TypeError, ValueError) as cause:
        raise CheckpointDamaged(f"The checkpoint cannot be read: {cause!r}") from cause


def read_state(directory: Path) -> dict[str, Any]:
    """Return the contents of ``state.json``, verified.

    Raises:
        CheckpointDamaged: it is missing or altered.
    """
    _check_files(directory, only=(STATE,))
    return _read_state(directory)


def read_part(directory: Path, part: str) -> State:
    """Return one part of a checkpoint, verified; empty if the checkpoint has no such part.

    Raises:
        CheckpointDamaged: files are missing or altered.
    """
    name = f"{part}{_SUFFIX}"
    has_tensors = (directory / name).exists()
    _check_files(directory, only=(STATE, name) if has_tensors else (STATE,))
    rest = _read_state(directory).get("parts", {}).get(part, {})
    return rest | _tensors(directory, part)


def load_model(directory: Path, network: nn.Module, *, partial: bool = False) -> dict[str, Any]:
    """Load a network from a checkpoint; return its state. ``partial``: ignore other tensors.

    Raises:
        CheckpointDamaged: files are missing, altered, or not of a checkpoint.
        CheckpointMismatch: names or shapes of the parameters differ.
    """
    _check_files(directory, only=(STATE, f"model{_SUFFIX}"))
    state = _read_state(directory)
    tensors = _tensors(directory, "model", needed=True)
    wanted = network.state_dict()
    check_shapes(wanted, tensors, partial=partial)
    network.load_state_dict({name: tensors[name] for name in wanted})
    return state


def check_shapes(wanted: dict[str, Tensor], found: dict[str, Tensor], *, partial: bool) -> None:
    """Compare a network with the tensors of a checkpoint; ``partial`` allows additional tensors.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, with both shapes.
    """
    for name, item in wanted.items():
        if name not in found:
            raise CheckpointMismatch(f"The checkpoint has no {name!r}, which the network needs.")
        if found[name].shape != item.shape:
            both = f"{list(found[name].shape)} in the checkpoint and {list(item.shape)}"
            raise CheckpointMismatch(f"{name!r} has shape {both} in the network.")
    spare = [name for name in found if name not in wanted]
    if spare and not partial:
        raise CheckpointMismatch(f"The checkpoint has {spare[0]!r}, which the network has not.")


# --- verification ----------------------------------------------------------------------------


def _check_files(directory: Path, only: tuple[str, ...] | None = None) -> None:
    """Refuse files that no checkpoint has, and files that differ from the manifest.

    ``only``: the files to verify. A checkpoint of the first format has no manifest.
    """
    try:
        there = {path.name: path for path in directory.iterdir()}
        for name, path in there.items():
            if _NAME.fullmatch(name) is None or path.is_symlink() or not path.is_file():
                detail = f"There is {name!r} in the checkpoint, which holds safetensors and JSON"
                raise CheckpointDamaged(f"{detail} files only.")
        if MANIFEST not in there and only is not None:
            return
        listed: dict[str, dict[str, Any]] = jsonio.loads((directory / MANIFEST).read_bytes())
        if listed.keys() | {MANIFEST} != there.keys():
            odd = sorted((listed.keys() | {MANIFEST}) ^ there.keys())
            detail = "The checkpoint's files are not those of its manifest"
            raise CheckpointDamaged(f"{detail}: {odd} are in one only.")
        for name in listed if only is None else only:
            _check_file(there[name], listed[name])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointDamaged(f"The checkpoint cannot be read: {cause!r}") from cause


def _check_file(path: Path, said: Mapping[str, Any]) -> None:
    found = described(path)
    if found != {name: said[name] for name in found}:
        detail = f"{path.name} is not what was written: it has {found['size_bytes']} bytes, and"
        raise CheckpointDamaged(f"{detail} {said['size_bytes']} were written.")


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        state = jsonio.loads((directory / STATE).read_bytes())
    except (OSError, ValueError) as cause:
        raise CheckpointDamaged(f"The checkpoint cannot be read: {cause!r}") from cause
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{STATE} of the checkpoint is not an object.")
    return state  # pyright: ignore[reportUnknownVariableType]


def _tensors(directory: Path, part: str, *, needed: bool = False) -> dict[str, Tensor]:
    path = directory / f"{part}{_SUFFIX}"
    if not needed and not path.exists():
        return {}
    try:
        return load_file(path)
    except Exception as cause:  # the library has its own error class
        raise CheckpointDamaged(f"The checkpoint cannot be read: {cause!r}") from cause
