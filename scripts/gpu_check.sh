#!/usr/bin/env bash
# Build, test and measure on a machine with an NVIDIA GPU, and write the record.
#
#   scripts/gpu_check.sh --trees                  where git is: the tree hashes to pass on; refuses a dirty tree
#   scripts/gpu_check.sh --tree HASHES [PART...]  there: run the parts (default all), each within ten minutes
#   scripts/gpu_check.sh --stale [DIR]            where git is: what changed since the record in DIR
#
# Parts: build tests memcheck racecheck ops e2e latency load record. Results collect in out/gpu_check/ until `record` writes
# benchmarks/h200/{ops,e2e,latency,load,tests}.json (or --record DIR). HASHES is "csrc=... runtime=... models=...". After
# `build`, parts may run side by side on different cards (CUDA_VISIBLE_DEVICES), but not two that measure.
set -euo pipefail
cd "$(dirname "$0")/.."

folders=(csrc runtime models)
record=benchmarks/h200
state=out/gpu_check
site=$state/site
python=python3
tree=
failed=0

trees() {
  for folder in "${folders[@]}"; do printf '%s=%s ' "$folder" "$(git rev-parse "HEAD:$folder")"; done | sed 's/ $//'
}

print_trees() {
  if [[ -n $(git status --porcelain -- "${folders[@]}") ]]; then
    echo "gpu_check: uncommitted changes in ${folders[*]}; a record must name what it measured. Commit first:" >&2
    git status --short -- "${folders[@]}" >&2
    exit 1
  fi
  trees && echo
}

stale() {
  local recorded changed=0
  recorded=$($python -c "import json,sys; print(json.load(open(sys.argv[1]))['tree'])" "$1/tests.json")
  for pair in $recorded; do
    local folder=${pair%%=*} hash=${pair#*=}
    if [[ $(git rev-parse "HEAD:$folder") != "$hash" ]]; then
      changed=1
      echo "$folder changed since the record:"
      git diff --stat "$hash" "HEAD:$folder" || echo "  (the recorded tree $hash is not in this repository)"
    fi
  done
  [[ $changed == 1 ]] || echo "the record in $1 is of this tree"
}

build() {  # for the card that is present, into a folder of its own
  $python -c "import compressed_tensors, transformers, xdist"  # what the tests need, before minutes are spent
  rm -rf "$site" && mkdir -p "$site"
  $python -m pip install -q --no-build-isolation --no-deps --no-index --target "$site" .
  $python -c "from nibblelm.ops import cuda; cuda.require(); print(cuda.available()[1])"
}

run_tests() {
  local status=0 files  # those of the server need packages that have no business on a card
  mapfile -t files < <(grep -rlE "mark\.(gpu|sanitize)" tests --include="test_*.py")
  OMP_NUM_THREADS=2 $python -m pytest -q -n $(($(nproc) / 2)) -p no:cacheprovider -m gpu --junitxml="$state/tests.xml" \
    "${files[@]}" || status=$?
  [[ $status -le 1 ]] # anything above is not a result
}

# $1: tool, over this project's kernels (torch's reductions have what racecheck calls hazards), in several processes
# with a share of the cases each. The tool's message is recorded where the machine refuses it.
sanitize() {
  local logs=$state/$1 status=0 processes=$(($(nproc) / 2)) pids=() share cases
  rm -rf "$logs" && mkdir -p "$logs"
  $python -m pytest -q --collect-only -p no:cacheprovider -m sanitize "${@:2}" | grep :: > "$logs/cases"
  split --number=r/$processes "$logs/cases" "$logs/share."
  for share in "$logs"/share.*; do
    mapfile -t cases < "$share"
    OMP_NUM_THREADS=2 timeout 180 compute-sanitizer --tool "$1" --kernel-name kns=nibblelm --error-exitcode 9 \
      "$python" -m pytest -q -p no:cacheprovider "${cases[@]}" > "$share.log" 2>&1 &
    pids+=($!)
  done
  for share in "${pids[@]}"; do wait "$share" || status=$?; done
  [[ $(grep -l "SUMMARY: 0 " "$logs"/*.log | wc -l) == "$processes" ]] || status=$((status ? status : 9))
  {
    echo "$(wc -l < "$logs/cases") cases in $processes processes, exit $status:"
    for share in "$logs"/*.log; do grep -E "SUMMARY|passed|failed" "$share" || tail -3 "$share"; done
  } | tr '\n' ' ' > "$state/$1.txt"
  echo "$1: $(cat "$state/$1.txt")"
  if [[ $status != 0 ]]; then  # which places, most hazards first: the summaries alone do not say
    failed=1
    grep -hE "(Error|Warning): |Invalid|Uninit" "$logs"/*.log | sed -E 's/0x[0-9a-f]+/0x/g; s/\[[0-9]+ hazards\]//' |
      sort | uniq -c | sort -rn | head -40 | tee "$state/$1.places.txt"
  fi
}

bench() {  # shape, bits and group size; the rest: options
  local shape=$1 bits=$2 group=$3
  shift 3
  $python -c "import sys; from nibblelm.cli import main; sys.exit(main())" bench --random-weights --device cuda --json \
    --shape "$shape" --bits "$bits" --group-size "$group" "$@" | tee -a "$state/e2e.jsonl" | cut -c1-330
}

e2e() {  # decode at batch 1; batches, long contexts and prefill where the weights are made anyway
  rm -f "$state/e2e.jsonl"
  local once=(--prompt-tokens 128 --gen-tokens 256)
  bench llama-3-8b 4 -1 --prompt-tokens 128 128 128 128 128 128 128 128 128 128 2048 64 32768 \
    --gen-tokens 256 256 256 256 256 256 256 256 256 256 16 16 16 --batch 1 4 8 16 32 64 128 256 1 1 1 1 1 \
    --depth 0 0 0 0 0 0 0 0 8192 32768 0 0 0 --mixed
  bench llama-3-8b 4 128 --prompt-tokens 128 --gen-tokens 256 --batch 1 64 256
  bench llama-3-8b 4 -1 --activations 8 --prompt-tokens 128 128 2048 --gen-tokens 256 256 16 --batch 16 256 1 --mixed
  bench llama-3-8b 4 -1 --kv int8 --prompt-tokens 128 128 128 2048 32768 --gen-tokens 256 256 256 16 16 \
    --batch 1 256 1 1 1 --depth 0 0 32768 0 0
  bench llama-3-8b 4 -1 --activations 8 --kv int8 --prompt-tokens 128 2048 --gen-tokens 256 16 --batch 256 1 --mixed
  bench llama-3-8b 8 -1 --prompt-tokens 128 2048 --gen-tokens 256 16
  bench llama-3-8b 16 -1 "${once[@]}"
  for bits in 4 8 16; do bench llama-3.2-1b $bits -1 "${once[@]}"; done
  for shape in gpt-neox-6.9b gemma2-9b llama-3-70b; do bench $shape 4 -1 "${once[@]}"; done
}

write_record() {
  mkdir -p "$record"
  $python - "$state" "$record" "$tree" << 'PYTHON'
import json, subprocess, sys, xml.etree.ElementTree as xml
from pathlib import Path

import torch

state, record, tree = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
suites = list(xml.parse(state / "tests.xml").getroot().iter("testsuite"))
count = {key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
failed = count["failures"] + count["errors"]
driver = subprocess.run(
    ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
).stdout.strip()
summary = {
    "passed": count["tests"] - failed - count["skipped"],
    "failed": failed,
    "skipped": count["skipped"],
    "tree": tree,
    "versions": {"gpu and driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
    "sanitizer": {p.stem: p.read_text().strip() for p in sorted(state.glob("*check.txt"))},
}
(record / "tests.json").write_text(json.dumps(summary, indent=1) + "\n")
results = {}
if (state / "e2e.jsonl").exists():
    results["e2e"] = [json.loads(line) for line in (state / "e2e.jsonl").open()]
for name in ("ops", "latency", "load"):
    if (state / f"{name}.json").exists():
        results[name] = json.loads((state / f"{name}.json").read_text())
for name, rows in results.items():
    if rows:
        (record / f"{name}.json").write_text(json.dumps([{**row, "tree": tree} for row in rows], indent=1) + "\n")
print(json.dumps(summary, indent=1))
PYTHON
}

parts=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --trees) print_trees; exit ;;
    --stale) stale "${2:-$record}"; exit ;;
    --tree) tree=$2; shift 2 ;;
    --record) record=$2; shift 2 ;;
    build | tests | memcheck | racecheck | ops | e2e | latency | load | record) parts+=("$1"); shift ;;
    *) echo "gpu_check: unknown argument '$1'" >&2; sed -n "4,10p" "$0" >&2; exit 2 ;;
  esac
done
for folder in "${folders[@]}"; do
  if [[ $tree != *"$folder="* ]]; then
    echo "gpu_check: pass --tree \"\$(scripts/gpu_check.sh --trees)\", made where git is" >&2
    exit 2
  fi
done
[[ ${#parts[@]} -gt 0 ]] || parts=(build tests memcheck racecheck ops e2e latency load record)
mkdir -p "$state"
PYTHONPATH=$PWD/$site
export PYTHONPATH PYTHONUNBUFFERED=1
for part in "${parts[@]}"; do
  echo "== $part"
  case $part in
    tests) run_tests ;;
    memcheck | racecheck) sanitize "$part" tests/ops ;;
    ops) $python scripts/bench_ops.py --quick --json "$state/ops.json" --tree "$tree" ;;
    latency) $python scripts/bench_latency.py --json "$state/latency.json" --tree "$tree" ;;
    load) $python scripts/bench_load.py --json "$state/load.json" --tree "$tree" ;;
    record) write_record ;;
    *) $part ;;
  esac
done
exit $failed
