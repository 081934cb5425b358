"""Draw benchmarks/quality.json: bits per weight against KL divergence, NibbleLM's formats and llama.cpp's.

    pip install matplotlib        (the extra "plot")
    python scripts/plot_quality.py

Writes benchmarks/quality.svg, the same bytes from the same record and matplotlib. Bits are those of the layers'
matrices with their scales; of NibbleLM's methods the plain one and the best are shown.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib  # type: ignore[import-not-found]

matplotlib.use("svg")
import matplotlib.pyplot as plt  # type: ignore[import-not-found]

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
CHECKPOINTS = {"demo": "demo, 7 M parameters", "stories260K": "stories260K", "tinystories656K": "tinystories656K"}
LINES = {"minmax": ("NibbleLM minmax", "tab:gray", "o"), "gptq": ("NibbleLM gptq", "tab:blue", "o")}
NAMES = {"int4 per-row": ("per row", (-8, -12)), "int4 g32": ("g32", (5, 2)), "int8 per-row": ("int8", (6, 0))}
"""What is written beside a format, and where; groups of 128 lie too close to one scale per row."""


def points(rows: list[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    """The rows with these values, by rising bits."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda row: row["linear_bits_per_weight"])


def draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """One checkpoint."""
    for method, (label, color, marker) in LINES.items():
        line = points(rows, tool="nibblelm", method=method)
        axes.plot(
            [r["linear_bits_per_weight"] for r in line], [r["kl_mean"] for r in line], marker, ls="-", color=color
        )
        axes.plot([], [], marker, ls="-", color=color, label=label)
        for row in line if method == "gptq" else []:
            if row["format"] in NAMES:
                _name(axes, row, *NAMES[row["format"]])
    peers = points(rows, tool="llama.cpp")
    axes.plot(
        [r["linear_bits_per_weight"] for r in peers],
        [r["kl_mean"] for r in peers],
        "s",
        color="tab:orange",
        label="llama.cpp",
    )
    for row in peers:
        _name(axes, row, row["format"], (3, 6))
    axes.set(title=title, xlabel="bits per weight", yscale="log")
    axes.margins(x=0.12)
    axes.grid(alpha=0.3)


def _name(axes: Any, row: dict[str, Any], text: str, offset: tuple[int, int]) -> None:
    place = row["linear_bits_per_weight"], row["kl_mean"]
    axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=7)


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "nibblelm", "svg.fonttype": "none", "font.size": 9})
    record = json.loads((FOLDER / "quality.json").read_text())
    figure, all_axes = plt.subplots(1, len(CHECKPOINTS), figsize=(11, 3.6), layout="constrained")
    for axes, (name, title) in zip(all_axes, CHECKPOINTS.items(), strict=True):
        draw(axes, [row for row in record if row["checkpoint"] == name], title)
    all_axes[0].set_ylabel("KL divergence, nats per token")
    all_axes[0].legend(fontsize=8)
    figure.savefig(FOLDER / "quality.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
