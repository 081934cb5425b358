"""Print the recorded results under benchmarks/ as Markdown tables: those of README, and what it says beside them.

python scripts/show_record.py
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
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


def beside(row: dict[str, Any], peers: Sequence[dict[str, Any]]) -> str:
    """What vLLM's formats reached with the load of a row of ours."""
    if row["shape"] != "llama-3-8b":
        return ""
    if row.get("load") == "mixed":
        wanted = ("mixed", row["requests"])
    elif (row["depth"], row["prompt_tokens"]) == (0, 128):
        wanted = ("decode", row["batch"])
    else:
        wanted = ("prefill" if (row["depth"], row["prompt_tokens"]) == (0, 2048) else "", row["batch"])
    found = {p["quant"]: p["tok_s"] for p in peers if (p["test"], p["batch"]) == wanted}
    return " / ".join(f"{found[quant]:,.0f}" if quant in found else "-" for quant in PEER_FORMATS) if found else ""


PEER_FORMATS = ("int4", "fp8")


def gpu(rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]] = ()) -> str:
    """Decode at batch 1 and depth 0, decode elsewhere, prefill, many requests of different lengths.

    peers  vLLM's rows, which get a column: decode where a row of ours decodes, else prefill
    """
    cells = []
    for row in rows:
        weights = scheme(row) + (", 8-bit activations" if row.get("activations") == 8 else "")
        weights += ", int8 KV" if row.get("kv") == "int8" else ""
        weights += "" if row["tree"] == rows[0]["tree"] else " (another tree)"
        if row.get("load") == "mixed":
            load = f"{row['requests']} requests, {row['prompt_tokens']:,} and {row['output_tokens']:,} tokens"
            cells.append([row["shape"], weights, load, f"{row['output_tok_s']['mean']:,.0f}", "", ""])
            continue
        load = f"batch {row['batch']}, depth {row['depth']}, prompt {row['prompt_tokens']}"
        load += f", room for {row['ctx_size']:,}" if row.get("ctx_size") else ""
        decode = f"{row['decode_tok_s']['mean']:,.0f}" if row["generated_tokens"] > 16 else ""
        prefill = f"{row['prefill_tok_s']['mean']:,.0f}"
        bandwidth = f"{row['achieved_gb_s']:,.0f} GB/s" if decode else ""
        cells.append([row["shape"], weights, load, decode, bandwidth, prefill])
    header = ["shape", "weights", "load", "decode tok/s", "memory traffic", "prefill tok/s"]
    if peers:
        run = "" if peers[0]["tree"] == rows[0]["tree"] else ", an earlier run"
        header.append(f"vLLM {peers[0]['version']} {' / '.join(PEER_FORMATS)}{run}")
        cells = [[*cell, beside(row, peers)] for cell, row in zip(cells, rows, strict=True)]
    return table(header, cells)


def vllm(rows: Sequence[dict[str, Any]]) -> str:
    """vLLM's rows, also those that stand beside none of ours."""
    names = [" ".join((row["engine"], row["version"], row["quant"])) for row in rows]
    cells = [[n, r["test"], f"{r['batch']}", f"{r['tok_s']:,.0f}"] for n, r in zip(names, rows, strict=True)]
    return table(["engine", "test", "sequences", "tok/s"], cells)


def drafts(rows: Sequence[dict[str, Any]]) -> str:
    """Decoding with drafts from a first run's text, of which a share is left right, and without, by turns."""
    cells = []
    for row in rows:
        ratio = "{median:.2f} x [{least:.2f}, {most:.2f}]".format(**row["speed_up"])
        accepted = f"{row['accepted_tokens'] / row['draft_tokens']:.0%}" if row["draft_tokens"] else "none drafted"
        speeds = (f"{row[name]['mean']:,.1f}" for name in ("decode_tok_s", "decode_tok_s_without"))
        right = f"{row['acceptance']:.0%}"
        cells.append([row["shape"], row["kernels"], scheme(row), str(row["batch"]), right, accepted, *speeds, ratio])
    header = ["shape", "kernels", "weights", "batch", "right in the text", "drafted tokens accepted"]
    return table([*header, "tok/s", "without", "ratio"], cells)


def latency(rows: Sequence[dict[str, Any]]) -> str:
    """First tokens, what a long prompt costs others, and sampled throughput."""
    cells = [
        [f"first token of a prompt of {r['prompt_tokens']:,}", f"{r['ms']:.2f} ms (at most {r['most_ms']:.2f})"]
        for r in rows
        if r["test"] == "first token"
    ]
    for row in rows:
        if row["test"] == "delay":
            cells.append(["longest wait of 8 streams while a prompt of 8,000 comes", f"{row['longest_gap_ms']:.1f} ms"])
            cells.append(["its first token, beside alone", f"{row['first_token_ms']:.0f} ms, {row['alone_ms']:.0f} ms"])
        if row["test"] == "sampled":
            both = f"{row['tok_s']:,.0f} tok/s, greedy {row['greedy_tok_s']:,.0f}"
            cells.append([f"{row['batch']} requests with top-p", both])
    return table(["what a user waits for", ""], cells)


def serve(rows: Sequence[dict[str, Any]]) -> str:
    """The server beside the engine without it."""
    cells = []
    for r in rows:
        match r["test"]:
            case "ready":
                text = f"{r['ready_s']:.2f} s, `import torch` alone {r['import_torch_s']:.2f} s"
            case "first token":
                text = f"{r['http_ms']:.2f} ms, the engine's own {r['engine_ms']:.2f} ms"
            case "mixed" | "pretended card":
                text = f"{r['http_tok_s']:,.0f} tok/s, the engine alone {r['engine_tok_s']:,.0f}: {r['cost']:.1%} less"
            case _:
                text = f"{r['requests_s']:.1f} requests/s, {r['output_tokens_s']:,.0f} tok/s; between two tokens "
                text += f"{r['itl_p50_ms']:.2f} ms (p50), {r['itl_p99_ms']:.2f} ms (p99)"
        kind = {"whole": ", whole answers", "streams": ", streams"}.get(r.get("kind", ""), "")
        cells.append([r["model"], r["test"] + kind, text])
    return table(["model", "test", ""], cells)


def held_out(rows: Sequence[dict[str, Any]]) -> str:
    """What a server on the CPU was sent, how it answered, and its memory before and after; beside what a pretended card
    showed, if that is there."""
    cells, pretended = [], [r for r in rows if "memory_before_bytes" not in r]
    for r in rows:
        if r in pretended:
            continue
        answers = f"{r['failed']} failed, {r['output_tokens_s']:,.0f} tok/s" if "failed" in r else ""
        answers = answers or ", ".join(f"{n:,} x {status}" for status, n in r["statuses"].items())
        memory = " to ".join(f"{r[f'memory_{when}_bytes'] / 2**20:,.1f}" for when in ("before", "after"))
        cells.append([r["test"], f"{r['requests']:,} in {r['seconds']:,.0f} s", answers, f"{memory} MiB"])
    held = table(["test", "requests", "answers (0: closed)", "memory"], cells)
    return held + (f"\n\n{serve(pretended)}" if pretended else "")


def conversions(rows: Sequence[dict[str, Any]]) -> str:
    """Calibrated conversions: time, memory, and what became of killed ones."""
    cells = []
    for r in rows:
        start = [f"{r['shape']}, {r['layers']} layers", f"{r['method']}, {r['format']}"]
        if r["test"] == "resume":
            same = "identical" if r["identical"] else "NOT identical"
            cells.append([*start, f"killed after {r['killed_after_tensors']} tensors, resumed: {same}", "", ""])
            continue
        seconds = "no layer was done twice" if r["whole_s"] is None else f"{r['whole_s']:.0f} s"
        seconds += f", extrapolated from {r['layers_done']} layers" if r["extrapolated"] else ""
        device = f"{r['device_bytes'] / 1e9:.1f} GB" if "device_bytes" in r else ""
        memory = f"{r['host_VmRSS_bytes'] / 1e9:.1f} GB ({r['host_RssAnon_bytes'] / 1e9:.1f} GB of it anonymous)"
        cells.append([*start, seconds, memory, device])
    return table(["checkpoint", "conversion", "time", "host memory", "device memory"], cells)


def folders(rows: Sequence[dict[str, Any]]) -> str:
    """Log-probabilities of converted folders, vLLM's and ours."""
    cells = []
    for row in rows:
        same = f"{row['mean']:.4f} (at most {row['most']:.4f})" if row["opened"] else "not opened"
        cells.append([row["folder"], f"{row['tokens']}", same])
    return table(["folder", "tokens", "mean difference from vLLM, nats"], cells)


def cpu(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios against both peers, taken in one alternating run."""
    cells: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        start = (row["shape"], str(row["threads"]), f"{row['phase']} int{row['bits']}", f"{row['ours_tok_s']:.1f}")
        ratio = f"{row['ratio_median']:.2f} x [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]"
        cells.setdefault(start, []).append(f"{row['peer_tok_s']:.1f}: {ratio}")
    header = ["shape", "threads", "phase", "tok/s", "llama.cpp Q4_0 / Q8_0", "torch dynamic int8"]
    return table(header, [[*start, *peers] for start, peers in cells.items()])


def cpu_older(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios of this tree and of an older one against the same peers, in the same rounds; of several runs."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        ratio = f"{row['ratio_median']:.2f} x [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]"
        peer = "older" if row["peer"].startswith("older") else row["peer"]
        run = f"{row['run']}: {row['rounds']} rounds"
        key = (run, row["shape"], str(row["threads"]), f"{row['phase']} int{row['bits']}", peer)
        cells.setdefault(key, {})["older" if "older" in row else "now"] = ratio
    header = ["run", "shape", "threads", "phase", "beside", "now", "older tree"]
    return table(header, [[*key, own["now"], own.get("older", "")] for key, own in cells.items()])


def families(rows: Sequence[dict[str, Any]]) -> str:
    """Decoding of each family at 1B, in bytes of matrices, beside llama's in the same rounds."""
    cells = []
    for row in rows:
        ratio = f"{row['ratio_median']:.2f} x [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]"
        rates = (f"{row[key]:.1f} GB/s" for key in ("gb_s", "llama_gb_s"))
        cells.append([row["shape"], f"{row['bytes'] / 1e6:.0f} MB", *rates, ratio])
    return table(["shape at 1B", "matrices", "decode", "llama", "ratio"], cells)


def footprint(rows: Sequence[dict[str, Any]]) -> str:
    """Load time beyond `import torch`, and peak memory beside what must be there."""
    cells = []
    for row in rows:
        rest = row["kv_bytes"] + row["torch_bytes"]
        shares = (f"{row['peak_bytes'] / (row[key] + rest):.2f} x" for key in ("file_bytes", "packed_bytes"))
        load = f"{row['load_s']:.2f} s ({row['load_untouched_s']:.2f} s)"
        peak = f"{row['peak_bytes'] / 2**20:,.0f} MiB"
        outside = f"{row['outside_kernels']:.1%}"
        cells.append([row["shape"], f"int{row['bits']}", load, peak, *shares, outside])
    against = [f"of {weights} + KV + torch" for weights in ("the file", "its matrices")]
    return table(["shape", "weights", "load", "peak memory", *against, "outside kernels"], cells)


def kernels(record: dict[str, Any]) -> str:
    """Medians over a model's matrices, for activations at 8 bits."""

    def rates(isa: str, bits: int, name: str) -> list[float]:
        return [r["median"] for r in record["rows"] if (r["isa"], r["bits"], r["name"]) == (isa, bits, name)]

    cells = []
    for isa, bits in sorted({(row["isa"], row["bits"]) for row in record["rows"]}):
        read, decode, prefill = (rates(isa, bits, name) for name in ("read", "decode D1", "prefill D1"))
        share = statistics.median(ours / limit for ours, limit in zip(decode, read, strict=True))
        rate = f"{statistics.median(decode):.0f} GB/s"
        cells.append([isa, f"int{bits}", rate, f"{share:.0%}", f"{statistics.median(prefill):.2f} Top/s"])
    return table(["instruction set", "weights", "decode", "of the read bandwidth", "prefill"], cells)


def checks(record: dict[str, Any]) -> str:
    """Tests, and what the sanitizers found."""
    files = record["files"].values()
    passed, failed, skipped = (sum(file[how] for file in files) for how in ("passed", "failed", "skipped"))
    older = sum(file["tree"] != record["tree"] for file in files)
    of = f" in {len(files)} files" + (f", {older} of them of another tree" if older else "")
    of += f", {cut} cut off" if (cut := sum("cut off" in file for file in files)) else ""
    cells = [["GPU tests", f"{passed} passed, {failed} failed, {skipped} skipped{of}"]]
    if cards := record.get("cards"):
        shown = f"{cards['passed']} passed, {cards['failed']} failed, {cards['skipped']} skipped"
        cells.append(["tests that need the cards alone", shown])
    for tool, ran in record["sanitizer"].items():
        text = ran["result"]
        found = sum(int(count) for count in re.findall(r"SUMMARY: (\d+) ", text))
        cells.append([tool, f"{text.partition(' cases')[0]} cases, {found} findings"])
    return table(["check", "result"], cells)


def wheel(record: dict[str, Any]) -> str:
    """The wheel for machines without compilers, and the tests that ran from one on a GPU."""
    sizes = f"{record['wheel_bytes'] / 1e6:.0f} MB, {record['installed_bytes'] / 1e6:.0f} MB installed"
    built = f"{record['build_cpu_seconds'] / 60:.0f} minutes of processor time"
    cells = [["size", sizes], ["built in", built], ["demo", record["demo"]]]
    if tests := record.get("gpu_tests"):
        counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
        cells.append([f"GPU tests from {tests['wheel']}, {tests['wheel_bytes'] / 1e6:.0f} MB", counts])
    return table([record["wheel"], ""], cells)


def limits(rows: Sequence[dict[str, Any]]) -> str:
    """The device's own rates, and the ops that one kernel at a time is held against."""
    cells = []
    for row in rows:
        if row["op"] in {"device", "softmax", "decode"}:
            rate = f"{row['gb_s']:,.0f} GB/s" if row["gb_s"] else f"{row['tflop_s']:.0f} TFLOP/s"
            share = f"{row['percent_of_peak']:.1f}%" if row["percent_of_peak"] else ""
            beside = f"{row['baseline']} {row['baseline_time_us']:.1f}" if row["baseline"] else ""
            cells.append([row["op"], row["shape"], f"{row['time_us']:.1f}", rate, share, beside])
    return table(["op", "shape", "us", "rate", "of the device's", "beside (us)"], cells)


def loads(rows: Sequence[dict[str, Any]]) -> str:
    """Checkpoints to the device, beside the bus."""
    cells = [
        [r["shape"], r["weights"], f"{r['load_s']:.3f} s", f"{r['load_gb_s']:.1f} GB/s", f"{r['pinned_gb_s']:.1f} GB/s"]
        for r in rows
    ]
    return table(["shape:layers", "weights", "load", "rate", "the bus"], cells)


def quality(rows: Sequence[dict[str, Any]]) -> str:
    """Loss by format and method: KL divergence from each checkpoint, and the demo model's other figures."""
    kinds = dict.fromkeys((row["tool"], row["format"], row["method"]) for row in rows)
    found = {(row["checkpoint"], row["tool"], row["format"], row["method"]): row for row in rows}
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    cells = []
    for kind in kinds:
        demo = found["demo", *kind]
        cells.append(
            [
                f"{kind[1]}" if kind[0] == "nibblelm" else " ".join(kind[:2]),
                "" if kind[0] != "nibblelm" else kind[2],
                f"{demo['linear_bits_per_weight']:.2f}",
                f"{demo['ppl']:.3f}",
                f"{100 * demo['top1_agreement']:.2f} %",
                *(f"{found[name, *kind]['kl_mean']:.5f}" for name in names),
            ]
        )
    first = next(row for row in rows if row["checkpoint"] == "demo")
    header = ["format", "method", "bits", "perplexity", "same first token", *(f"KL, {name}" for name in names)]
    return f"The source's perplexity is {first['source_ppl']:.3f}.\n\n" + table(header, cells)


def recorded(name: str) -> list[dict[str, Any]]:
    """The rows of a record, none where there is no such file."""
    path = ROOT / name
    return json.loads(path.read_text()) if path.exists() else []


RECORDS: dict[str, Callable[[Any], str]] = {
    "cpu/peers.json": cpu,
    "cpu/peers_older.json": cpu_older,
    "cpu/footprint.json": footprint,
    "cpu/families.json": families,
    "cpu/avx2.json": kernels,
    "cpu/drafts.json": drafts,
    "cpu/serve.json": held_out,
    "quality.json": quality,
    "wheel.json": wheel,
    "h200/e2e.json": lambda rows: gpu(rows, recorded("h200/peers.json")),
    "h200/drafts.json": drafts,
    "h200/peers.json": vllm,
    "h200/latency.json": latency,
    "h200/serve.json": serve,
    "h200/convert.json": conversions,
    "h200/vllm_folders.json": folders,
    "h200/tests.json": checks,
    "h200/ops.json": limits,
    "h200/load.json": loads,
}


def main() -> None:
    for name, show in RECORDS.items():
        path = ROOT / name
        if path.exists():
            record = json.loads(path.read_text())
            facts = record if isinstance(record, dict) else record[0]
            tree = next(facts[key] for key in ("tree", "commit", "csrc") if facts.get(key))
            print(f"{name}, measured on {tree}\n\n{show(record)}\n")


if __name__ == "__main__":
    main()
