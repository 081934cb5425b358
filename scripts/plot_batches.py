"""Draw benchmarks/h200/e2e.json and peers.json: sequences together against tokens per second, ours and vLLM's.

    pip install matplotlib        (the extra "plot")
    python scripts/plot_batches.py [FOLDER]

Writes batches.svg beside the records, the same bytes from the same records and matplotlib. Both engines decode 256
tokens after prompts of 128, all sequences at once.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from show_record import scheme

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "h200"
SHAPE = "llama-3-8b"
COLORS = ("tab:blue", "tab:cyan", "tab:purple", "tab:green", "tab:olive", "tab:brown")
PEER_COLORS = ("tab:orange", "tab:red")

Lines = dict[str, list[tuple[int, float]]]
"""Label -> (batch, tok/s), by rising batch."""


def our_lines(rows: list[dict[str, Any]]) -> Lines:
    """Each format that was measured at several batches."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        load = (row["shape"], row.get("depth"), row.get("prompt_tokens"), row.get("generated_tokens"))
        if load != (SHAPE, 0, 128, 256) or row.get("load") or row.get("ctx_size"):
            continue
        label = f"NibbleLM {scheme(row)}"
        label += ", 8-bit activations" if row.get("activations") == 8 else ""
        label += ", int8 KV" if row.get("kv") == "int8" else ""
        label += "" if row["tree"] == rows[0]["tree"] else " (another tree)"
        lines.setdefault(label, {})[row["batch"]] = row["decode_tok_s"]["mean"]
    return {label: sorted(line.items()) for label, line in lines.items() if len(line) > 1}


def peer_lines(rows: list[dict[str, Any]]) -> Lines:
    """Each of vLLM's formats."""
    lines: Lines = {}
    for row in rows:
        if row["test"] == "decode":
            label = " ".join((row["engine"], row["version"], row["quant"]))
            lines.setdefault(label, []).append((row["batch"], row["tok_s"]))
    return {label: sorted(line) for label, line in lines.items()}


def draw(folder: Path) -> Path:
    """Write the picture of a folder's records; returns its path."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("svg")
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    plt.rcParams.update({"svg.hashsalt": "nibblelm", "svg.fonttype": "none", "font.size": 9})
    ours, peers = (json.loads((folder / f"{name}.json").read_text()) for name in ("e2e", "peers"))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (label, line), color in zip(our_lines(ours).items(), COLORS, strict=False):
        axes.plot(*zip(*line, strict=True), "o-", color=color, label=label, markersize=4)
    for (label, line), color in zip(peer_lines(peers).items(), PEER_COLORS, strict=False):
        axes.plot(*zip(*line, strict=True), "s--", color=color, label=label, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="sequences together", ylabel="decoded tokens per second")
    batches = [2**i for i in range(9)]
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_title(f"{SHAPE} on one {peers[0]['device']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(folder / "batches.svg", metadata={"Date": None})
    plt.close(figure)
    return folder / "batches.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    print(draw(parser.parse_args().folder))


if __name__ == "__main__":
    main()
