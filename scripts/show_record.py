"""Print the recorded results under benchmarks/ as the Markdown tables of README.

python scripts/show_record.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "benchmarks"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def scheme(row: dict[str, Any]) -> str:
    """What the weights of a row are."""
    if row["bits"] == 16:
        return "bf16"
    return f"int{row['bits']} {'per row' if row['group_size'] == -1 else 'groups of ' + str(row['group_size'])}"


def gpu(rows: Sequence[dict[str, Any]]) -> str:
    """Decode at batch 1 and depth 0, decode elsewhere, prefill."""
    cells = []
    for row in rows:
        load = f"batch {row['batch']}, depth {row['depth']}, prompt {row['prompt_tokens']}"
        decode = f"{row['decode_tok_s']['mean']:,.0f}" if row["generated_tokens"] > 16 else ""
        prefill = f"{row['prefill_tok_s']['mean']:,.0f}"
        bandwidth = f"{row['achieved_gb_s']:,.0f} GB/s" if decode else ""
        cells.append([row["shape"], scheme(row), load, decode, bandwidth, prefill])
    return table(["shape", "weights", "load", "decode tok/s", "memory traffic", "prefill tok/s"], cells)


def cpu(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios against the peers, taken in one alternating run."""
    cells = [
        [
            row["shape"],
            str(row["threads"]),
            f"{row['phase']} int{row['bits']}",
            f"{row['ours_tok_s']:.1f}",
            row["peer"],
            f"{row['peer_tok_s']:.1f}",
            f"{row['ratio_median']:.2f} [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]",
        ]
        for row in rows
    ]
    return table(["shape", "threads", "phase", "tok/s", "peer", "its tok/s", "ratio [least, most]"], cells)


def main() -> None:
    for name, show in (("cpu/peers.json", cpu), ("h200/e2e.json", gpu)):
        path = ROOT / name
        if path.exists():
            rows = json.loads(path.read_text())
            print(f"{name}, measured on {rows[0].get('tree') or rows[0].get('commit')}\n\n{show(rows)}\n")


if __name__ == "__main__":
    main()
