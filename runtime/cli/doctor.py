"""`nibblelm doctor`: what this installation can do here, and why it cannot do the rest."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from nibblelm import __version__

HELP = "say what works on this machine, and why the rest does not"

_PACKAGES = ("torch", "safetensors", "tokenizers", "sentencepiece", "jinja2", "huggingface-hub", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    """Prints one line per fact; exit code 1 when the CPU kernels, which everything needs, do not load."""
    del args
    print(f"nibblelm {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            print(f"{name}: {version(name)}")
        except PackageNotFoundError:
            optional = " (optional: only tests need it)" if name == "transformers" else ""
            print(f"{name}: not installed{optional}")
    try:
        from nibblelm import _cpu

        isas = ", ".join(_cpu.available_isas())
        print(f"CPU kernels: {_cpu.isa()} in use of {isas}; {_cpu.threads()} threads")
        works = True
    except ImportError as error:
        print(f"CPU kernels: cannot be loaded: {error}; install again with a C++ compiler at hand")
        works = False
    from nibblelm import ops

    usable, reason = ops.cuda_available()
    print(f"CUDA kernels: {'usable' if usable else 'not usable'}: {reason}")
    return 0 if works else 1
