"""A checkpoint folder: config.json first, then its weight files, then tensors by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from nibblelm.checkpoint.hub import resolve
from nibblelm.checkpoint.json_object import listed, read_object, shown
from nibblelm.checkpoint.quantization import Quantization, Scheme
from nibblelm.checkpoint.safetensors_file import SafetensorsFile, TensorInfo
from nibblelm.errors import CheckpointError, ConfigError
from nibblelm.ops.types import QuantizedWeight, Weight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(source: str | Path, revision: str | None = None) -> "Checkpoint":
    """Open a folder or a hub id. Reads config.json; weight files are opened by the first question about a tensor."""
    return Checkpoint(resolve(source, revision))


def file_in(folder: Path, name: str, within: Path | None = None) -> Path | None:
    """The path of a file of a checkpoint folder, or of a folder `within` one, None when it does not exist.

    Raises CheckpointError for a name with a folder in it and for a link that leads out of the folder. The links
    of a hub cache (snapshots/<revision>/<name> to blobs/<hash> of the same model) are within bounds.
    """
    # A file name must not mean another folder on any system: "C:x" and "a\\b" do on Windows.
    if name in ("", "..") or not Path(name).name == PureWindowsPath(name).name == name or "\0" in name:
        raise CheckpointError(f"{folder}: {shown(name)} is not a bare file name")
    path = folder / name
    try:
        if not path.is_symlink():
            return path if path.exists() else None
        home, target = (within or folder).resolve(), path.resolve()
    except (OSError, RuntimeError, UnicodeError) as cause:  # a loop of links, a name that no file can have
        raise CheckpointError(f"{folder}: cannot look up {shown(name)}: {cause}") from cause
    cache = home.parent.parent
    in_cache = home.parent.name == "snapshots" and (cache / "blobs").is_dir() and target.is_relative_to(cache)
    if not (target.is_relative_to(home) or in_cache):
        raise CheckpointError(f"{path} is a link that leads out of the folder, to {target}; copy the file instead")
    return path if target.exists() else None


class Checkpoint:
    """Tensors of one model by name, out of one safetensors file or the shards of an index.

    config             config.json as it is; generation_config likewise, {} when there is none
    quantization       the parsed quantization_config, None for an unquantized model
    Raises ConfigError for the JSON files of the configuration and CheckpointError for everything else.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config = self.file("config.json")
        if config is None:
            raise ConfigError(f"{self.folder} has no config.json, so it is not a model folder{_instead(self.folder)}")
        self.config: dict[str, Any] = read_object(config, ConfigError)
        generation = self.file("generation_config.json")
        self.generation_config: dict[str, Any] = read_object(generation, ConfigError) if generation else {}
        quantization = self.config.get("quantization_config")
        if quantization is not None and not isinstance(quantization, dict):
            raise ConfigError(f"{config}: quantization_config must be an object, got {shown(quantization)}")
        self.quantization = None if quantization is None else Quantization(quantization)
        if self.file(SINGLE) is None and self.file(INDEX) is None:
            raise CheckpointError(_no_weights(self.folder))
        self._named: Callable[[str], str | None] = lambda name: name

    def rename(self, named: Callable[[str], str | None]) -> None:
        """Know each tensor by `named` of its name in the file from now on; those of None are left out."""
        self._named = named

    def file(self, name: str) -> Path | None:
        """The path of a file of this folder by the rules of `file_in`."""
        return file_in(self.folder, name)

    @cached_property
    def _home(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Which file holds each tensor, and under what name."""
        home: dict[str, tuple[SafetensorsFile, str]] = {}
        for stored, file in self._files.items():
            if (name := self._named(stored)) is None:
                continue
            if name in home:
                raise CheckpointError(f"{self.folder}: {shown(stored)} and {shown(home[name][1])} are both {name!r}")
            home[name] = file, stored
        return home

    @property
    def skipped(self) -> list[str]:
        """The tensors in the files that belong to no part of the model that is read."""
        return [stored for stored in self._files if self._named(stored) is None]

    def all_infos(self) -> list[TensorInfo]:
        """Of every tensor in the files, also of those left out, which keep their names."""
        infos = [(file.info(stored), self._named(stored)) for stored, file in self._files.items()]
        return [info if name is None else replace(info, name=name) for info, name in infos]

    @cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        """Which file holds each tensor by its name there; opens every weight file and validates its header."""
        single = self.file(SINGLE)  # as transformers does, the single file comes before an index
        if single is not None:
            file = SafetensorsFile(single)
            return dict.fromkeys(file.names(), file)
        index = self.file(INDEX)
        if index is None:
            raise CheckpointError(_no_weights(self.folder))
        return self._open_shards(index)

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_object(index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map must be a filled object, got {shown(weight_map)}")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {shown(tensor)} is in {shown(name)}, which is not a safetensors file")
        paths = {name: self.file(name) for name in sorted(set(weight_map.values()))}
        missing = [name for name, path in paths.items() if path is None]
        if missing:
            raise CheckpointError(f"{self.folder}: shards named by the index are missing: {listed(missing)}")
        shards = {name: SafetensorsFile(path) for name, path in paths.items() if path is not None}
        absent = [tensor for tensor, name in weight_map.items() if tensor not in shards[name].infos]
        if absent:
            raise CheckpointError(f"{index}: tensors that are not in the shard it names: {listed(absent)}")
        extra = [t for name, shard in shards.items() for t in shard.infos if weight_map.get(t) != name]
        if extra:
            raise CheckpointError(f"{index}: tensors that are in a shard but not where the index says: {listed(extra)}")
        return {tensor: shards[name] for tensor, name in weight_map.items()}

    def names(self) -> list[str]:
        """All tensor names, in the order of the header or index."""
        return list(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def _file_of(self, name: str) -> tuple[SafetensorsFile, str]:
        if name not in self._home:
            raise CheckpointError(f"{self.folder} has no tensor {shown(name)}")
        return self._home[name]

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape, bytes and file of a tensor, without reading it."""
        file, stored = self._file_of(name)
        return replace(file.info(stored), name=name)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, without copying."""
        file, stored = self._file_of(name)
        return file.tensor(stored)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, without copying."""
        file, stored = self._file_of(name)
        return file.rows(stored, start, stop)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages that were read; may be called between blocks of `rows`."""
        file, stored = self._file_of(name)
        file.release(stored)

    @property
    def modules_quantized(self) -> list[str]:
        """Names of the modules stored as int4 or int8."""
        suffix = ".weight_packed"
        return [name.removesuffix(suffix) for name in self._home if name.endswith(suffix)]

    def weight(self, module: str) -> Weight:
        """`<module>.weight` as an fp32 / bf16 / fp16 tensor, or a `QuantizedWeight` of its packed tensors."""
        if f"{module}.weight_packed" in self:
            return self._quantized(module)
        info = self.info(f"{module}.weight")
        if self.quantization is not None and self.quantization.names_exactly(module):
            raise CheckpointError(
                f"{info.file}: config.json says {shown(module)} is quantized, but it is stored as it is"
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.file}: {shown(info.name)} is {info.dtype}; weights can be fp32, bf16 or fp16")
        return self.tensor(info.name)

    def _quantized(self, module: str) -> QuantizedWeight:
        scheme = self.quantization.scheme(module) if self.quantization else None
        if scheme is None:
            raise CheckpointError(
                f"{self.folder}: {shown(module)} is stored quantized, but quantization_config in config.json "
                "does not say how"
            )
        stored = {part for part in _PARTS if f"{module}.{part}" in self}
        expected = {"weight_packed", "weight_scale", "weight_shape"} | (
            set() if scheme.symmetric else {"weight_zero_point"}
        )
        if stored != expected:
            raise CheckpointError(
                f"{self.folder}: {shown(module)} in {scheme} needs {', '.join(sorted(expected))}; "
                f"stored are {', '.join(sorted(stored))}"
            )
        n, k = self._stored_shape(module)
        words, groups = -(-k // (32 // scheme.bits)), 1 if scheme.group_size == -1 else k // scheme.group_size
        if scheme.group_size != -1 and k % scheme.group_size:
            raise CheckpointError(
                f"{self.folder}: groups of {scheme.group_size} do not divide the {k} columns of {module!r}"
            )

        def part(name: str, shape: tuple[int, int], *dtypes: torch.dtype) -> Tensor:
            return self._part(f"{module}.{name}", shape, dtypes, scheme)

        zero_shape = (-(-n // (32 // scheme.bits)), groups)
        return QuantizedWeight(
            codes=part("weight_packed", (n, words), torch.int32),
            scale=part("weight_scale", (n, groups), *FLOATS),
            zero_point=None if scheme.symmetric else part("weight_zero_point", zero_shape, torch.int32),
            bits=scheme.bits,
            group_size=scheme.group_size,
            shape=(n, k),
        )

    def _part(self, name: str, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], scheme: Scheme) -> Tensor:
        info = self.info(name)
        if info.shape != shape or info.dtype not in dtypes:
            raise CheckpointError(
                f"{info.file}: {shown(name)} is {info.dtype} {info.shape}; {scheme} and weight_shape need "
                f"{' or '.join(map(str, dtypes))} {shape}"
            )
        return self.tensor(name)

    def _stored_shape(self, module: str) -> tuple[int, int]:
        info = self.info(f"{module}.weight_shape")
        if info.shape != (2,) or info.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{info.file}: {shown(info.name)} is {info.dtype} {info.shape}, not two int64")
        n, k = self.tensor(info.name).tolist()
        if n < 1 or k < 1:
            raise CheckpointError(f"{info.file}: {shown(info.name)} says {n} x {k}; both must be positive")
        return n, k


_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def _instead(folder: Path) -> str:
    """What a folder without a config.json, or without weights, may be."""
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter: merge it into its base model first (merge_and_unload of peft)"
    if next(folder.glob("*.gguf"), None) is not None:
        return "; its GGUF file is for llama.cpp: take the model's safetensors"
    return ""


def _no_weights(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as cause:
        return f"cannot read {folder}: {cause.strerror or cause}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{folder} has its weights only as pickles ({listed(pickles)}). A pickle can run any code when it is read, "
            "so it is refused. If you trust its source, convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST, safe_serialization=True)"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"; it has {listed(others)}" if others else _instead(folder)
    return f"{folder} has neither {SINGLE} nor {INDEX}{found}. From the hub only safetensors are fetched, never pickles"
