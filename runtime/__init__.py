"""NibbleLM: a small, exact and fast runtime for decoder language models with int4 and int8 weights."""

from typing import TYPE_CHECKING, Any

if __name__ != "nibblelm":
    raise ImportError(
        f"this folder is the package 'nibblelm', not '{__name__}': install it with pip and import nibblelm"
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nibblelm.converter import convert
    from nibblelm.engine import LLM
    from nibblelm.errors import NibbleLMError
    from nibblelm.request import GenerationOutput, StreamPiece
    from nibblelm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "GenerationOutput",
    "NibbleLMError",
    "SamplingParams",
    "StreamPiece",
    "__version__",
    "convert",
]

_HOME = {
    "LLM": "nibblelm.engine",
    "GenerationOutput": "nibblelm.request",
    "StreamPiece": "nibblelm.request",
    "SamplingParams": "nibblelm.sampling_params",
    "NibbleLMError": "nibblelm.errors",
    "convert": "nibblelm.converter",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `nibblelm --help` must not pay for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'nibblelm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
