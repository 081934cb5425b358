#!/usr/bin/env bash
# Build, test and measure on a machine with an NVIDIA GPU, and write the record.
#
#   scripts/gpu_check.sh --trees                  where git is: the tree hashes to pass on; refuses a dirty tree
#   scripts/gpu_check.sh --tree HASHES [PART...]  there: run the parts, each within ten minutes
#   scripts/gpu_check.sh --stale [DIR]            where git is: what changed since the records in DIR
#
# Parts: build tests memcheck racecheck ops e2e drafts families latency load serve convert record, the default, and
#   cards                what must have the cards to itself: memory given back, with two nothing of one on the other
#   schedules            random schedules of the engine, five for each kind of model, and full batches of 256
#   peers, vllm-folders  need --vllm DIR, with run_vllm.py and vLLM's site.tar.xz
# With --wheel FILE, one of `make wheel`, build installs that: the tests' result is then also the wheel's. With --data
# DIR tests find the real checkpoints and text that some of them read. With --only "PATH...", tests and sanitizers
# take these files and folders alone; each file's result is recorded with its tree, and files that did not run keep
# theirs; where time was up before the end, all of that run's say "cut off". With --covering sanitizers run no cases
# beyond those that together launch every kernel. With --again DIR, which has the tests*.xml and schedules.xml of a
# run of the same tree, tests and schedules run what failed there alone and count the rest of that run too; the record
# says how many ran again. Results collect in out/gpu_check/ until `record` writes them to benchmarks/h200/*.json (or
# --record DIR) and, of a wheel's whole run, benchmarks/wheel.json; rows that were not measured again stay there.
# HASHES is "csrc=... runtime=... models=...". A part that fails does not keep the next from running; with --limit S
# all end after S seconds, and what was measured by then stays. After `build`, parts may run side by side on different
# cards (CUDA_VISIBLE_DEVICES), but not two that measure; convert, e2e and families take all cards there are, tests
# and sanitizers those that CUDA_VISIBLE_DEVICES names.
set -euo pipefail
cd "$(dirname "$0")/.."

folders=(csrc runtime models)
record=benchmarks/h200
state=out/gpu_check
site=$state/site
python=python3
tree=
vllm=
wheel=
data=
only=
covering=
again=
limit=86400
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

stale() {  # folder by folder for the tests, then which other records are of another tree
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
  $python - "$(trees)" "$1"/*.json << 'PYTHON' || changed=1
import json, re, sys
from pathlib import Path

tree, *paths = sys.argv[1:]
old = 0
for path in map(Path, paths):
    rows = record if isinstance(record := json.loads(path.read_text()), list) else [record]
    if path.name == "tests.json":
        rows, marked = [*record["files"].values()], ("mark.gpu", "mark.sanitize")
        with_tests = [str(f) for f in Path("tests").rglob("test_*.py") if any(mark in f.read_text() for mark in marked)]
        if missing := sorted(set(with_tests) - set(record["files"])):
            old = 1
            print(f"{path.name}: not run: {' '.join(missing)}")
    if count := sum(row["tree"] != tree for row in rows):
        old = 1
        print(f"{path.name}: {count} of {len(rows)} rows are of another tree")
    if path.name == "tests.json":
        others = {**record["sanitizer"], **{name: record[name] for name in ("cards", "schedules") if name in record}}
        if names := [name for name, ran in others.items() if ran["tree"] != tree]:
            old = 1
            print(f"{path.name}: of another tree: {' '.join(names)}")
        for name, ran in record["sanitizer"].items():
            count = re.match(r"(\d+) of (\d+) cases(, \d+ of \d+ kernels)?.* exit (\d+)", ran["result"])
            if count and count[4] != "0":
                old = 1
                print(f"{path.name}: {name}: {count[1]} of {count[2]} cases passed{count[3] or ''}")
sys.exit(old)
PYTHON
  [[ $changed == 1 ]] || echo "the record in $1 is of this tree"
}

left() {  # seconds for a script that ends by itself: of all parts, at most of ten minutes
  local all=$((limit - SECONDS - 10))
  echo $((all > 580 ? 580 : all > 1 ? all : 1))
}

bounded() {  # a command, until the time of all parts is up; $signal: what it is told then
  local all=$((limit - SECONDS))
  timeout --signal="${signal:-TERM}" --kill-after=10 $((all > 1 ? all : 1)) "$@"
}

build() {  # for the card that is present, or from a wheel for all; into a folder of its own
  $python -c "import compressed_tensors, transformers, xdist"  # what the tests need, before minutes are spent
  rm -rf "$site" && mkdir -p "$site"
  local other
  rm -f "$state/wheel.txt" "$state"/tests*.{xml,cut} "$state"/*check*.txt "$state"/kernels*.jsonl
  $python -m pip install -q --no-build-isolation --no-deps --no-index --target "$site" "${wheel:-.}"
  if [[ -n $wheel ]]; then
    other=$(diff -rq -x __pycache__ runtime "$site/nibblelm" | grep -v "^Only in $site/nibblelm" || true)
    [[ -z $other ]] || { echo "gpu_check: $wheel is of another checkout: $other" >&2; return 1; }
    stat --printf '%n %s' "$wheel" > "$state/wheel.txt"
  fi
  $python -c "from nibblelm.ops import cuda; cuda.require(); print(cuda.available()[1])"
}

gpu_tests() {  # $1: name of the results; the rest: what to run, in place of which comes what failed in `again`
  local name=$1 what=("${@:2}") status=0
  rm -f "$state/$name".{again.xml,again.cut,cut}
  [[ -n $again ]] || rm -f "$state/$name.xml"  # a run that is killed leaves none, and must not seem to be an older one
  if [[ -n $again ]]; then
    cp "$again/$name.xml" "$state/$name.xml"
    mapfile -t what < <(failed_in "$again/$name.xml")
    [[ ${#what[@]} -gt 0 ]] || return 0
    name+=.again
  fi
  signal=INT OMP_NUM_THREADS=1 bounded $python -m pytest -q -n $(($(nproc) - 1)) -p no:cacheprovider -m gpu \
    ${data:+--data "$data"} $([[ $1 != schedules ]] || echo --schedules 500) --junitxml="$state/$name.xml" \
    "${what[@]}" || status=$?
  # Interrupted, it has written what it ran; killed behind that, it may not have.
  [[ $status != 124 && $status != 137 ]] || touch "$state/$name.cut"
  return $status
}

failed_in() {
  $python - "$1" << 'PYTHON'
import sys, xml.etree.ElementTree as xml

for case in xml.parse(sys.argv[1]).getroot().iter("testcase"):
    if case.find("failure") is not None or case.find("error") is not None:
        module = (case.get("classname") or case.get("name")).split(".")
        named = next((i for i, part in enumerate(module) if part.startswith("test_")), len(module) - 1) + 1
        cases = [*module[named:], case.get("name")] if case.get("classname") else []  # else the file could not be read
        print("::".join(["/".join(module[:named]) + ".py", *cases]))
PYTHON
}

part_name() {  # of results of tests: another one for each choice of files
  local name
  # shellcheck disable=SC2086  # words of their own
  name=$1${only:+.$(basename -a -s .py $only | paste -sd+)}
  [[ ${#name} -le 120 ]] || name=$1.$(cksum <<< "$only" | cut -d' ' -f1)
  echo "$name"
}

run_tests() {
  local what  # files of the server need packages that have no business on a card
  # shellcheck disable=SC2086  # words of their own
  mapfile -t what < <(grep -rlE "mark\.(gpu|sanitize)" ${only:-tests} --include="test_*.py")
  [[ ${#what[@]} -gt 0 ]] || { echo "gpu_check: no GPU tests in '$only'" >&2; return 2; }
  gpu_tests "$(part_name tests)" "${what[@]}"
}

schedules() {
  gpu_tests schedules tests/engine/test_exactness.py -k "test_ids_are_those or full_batch"
}

cards() {  # alone, since the driver counts what all processes take
  bounded $python -m pytest -q -p no:cacheprovider -m gpu -k card --junitxml="$state/cards.xml" \
    tests/engine/test_cuda_engine.py
}

need_vllm() {
  if [[ ! -f $vllm/run_vllm.py ]]; then
    echo "gpu_check: '$vllm' has no run_vllm.py; pass --vllm DIR" >&2
    return 2
  fi
  [[ -d $state/vllm ]] || { mkdir -p "$state/vllm.partial" && tar xJf "$vllm/site.tar.xz" -C "$state/vllm.partial" &&
    mv "$state/vllm.partial" "$state/vllm"; }
}

peers() {
  need_vllm
  bounded $python scripts/bench_gpu_peers.py --runner "$vllm/run_vllm.py" --site "$state/vllm" \
    --work "$state/peers" --limit $(($(left) / 2)) --json "$state/peers.json" --tree "$tree"
}

vllm_folders() {
  need_vllm
  bounded $python scripts/check_vllm.py --site "$state/vllm" --work "$state/vllm-folders" \
    --limit "$(left)" --json "$state/vllm_folders.json" --tree "$tree"
}

# Three runs, each on a card of its own as far as there are some: time of either method, and resuming
convert() {
  local count jobs job card=0 pids=() status=0
  count=$($python -c "import torch; print(torch.cuda.device_count())")
  jobs=("--method gptq --resume-layers 0" "--method awq" "--method gptq --layers 0")
  for job in "${jobs[@]}"; do
    [[ $card -lt $count ]] || { wait "${pids[0]}" || status=1; pids=("${pids[@]:1}"); }
    # shellcheck disable=SC2086  # words of their own
    bounded $python scripts/bench_convert.py $job --device "cuda:$((card % count))" --work "$state/convert-$card" \
      --limit "$(left)" --json "$state/convert.json" --tree "$tree" &
    pids+=($!)
    card=$((card + 1))
  done
  for job in "${pids[@]}"; do wait "$job" || status=1; done
  return $status
}

sanitize() {  # $1: tool
  local what  # files that it can have cases of
  # shellcheck disable=SC2086  # words of their own
  mapfile -t what < <(grep -rlE "mark\.sanitize" ${only:-tests} --include="test_*.py")
  [[ ${#what[@]} -gt 0 ]] || { echo "gpu_check: no tests for sanitizers in '$only'" >&2; return 2; }
  local to
  to=$state/$(part_name "$1")
  $python scripts/sanitize.py "$1" "${what[@]}" --limit "$(left)" --kernels "$state/$(part_name kernels).jsonl" \
    --logs "$to.logs" --result "$to.txt" $covering
}

bench() {  # card, shape, bits and group size; the rest: options
  local card=$1 shape=$2 bits=$3 group=$4
  shift 4
  bounded $python -m nibblelm bench --random-weights --device "cuda:$card" --json \
    --shape "$shape" --bits "$bits" --group-size "$group" "$@" | tee -a "$state/$rows.jsonl" | cut -c1-330 ||
    { echo "bench $shape $bits $group: failed" && return 1; }
}

# $1: name of the results; the rest: what `bench` takes, a string each. Every card takes the next one, since most of the
# time goes to making weights. One that fails does not lose the others.
bench_all() {
  local rows=$1 lost=0 count card pids=()
  shift
  rm -f "$state/$rows.jsonl"
  echo 1 > "$state/next"
  count=$($python -c "import torch; print(torch.cuda.device_count())")
  for ((card = 0; card < count; card++)); do
    (
      lost=0
      while true; do
        exec 9> "$state/next.lock"
        flock 9
        next=$(< "$state/next")
        echo $((next + 1)) > "$state/next"
        exec 9>&-
        [[ $next -le $# ]] || exit $lost
        # shellcheck disable=SC2086  # words of their own
        bench "$card" ${!next} || lost=1
      done
    ) &
    pids+=($!)
  done
  for card in "${pids[@]}"; do wait "$card" || lost=1; done
  return $lost
}

e2e() {  # decode at batch 1; batches, long contexts and prefill where the weights are made anyway; the longest first
  local once="--prompt-tokens 128 --gen-tokens 256" five="128 128 128 128 128" kinds
  kinds=(
    "llama-3-70b 4 -1 $once"
    "llama-3-8b 4 -1 --prompt-tokens $five $five 2048 64 32768 --gen-tokens 256 256 256 256 256 256 256 256 256 256 16 16 16
      --batch 1 4 8 16 32 64 128 256 1 1 1 1 1 --depth 0 0 0 0 0 0 0 0 8192 32768 0 0 0 --mixed"
    "llama-3-8b 4 -1 --kv int8 --prompt-tokens 128 128 128 2048 32768 --gen-tokens 256 256 256 16 16
      --batch 1 256 1 1 1 --depth 0 0 32768 0 0"
    "llama-3-8b 4 -1 --activations 8 --prompt-tokens 128 128 2048 --gen-tokens 256 256 16 --batch 16 256 1 --mixed"
    "llama-3-8b 4 -1 --activations 8 --kv int8 --prompt-tokens 128 2048 --gen-tokens 256 16 --batch 256 1 --mixed"
    "llama-3-8b 4 128 --prompt-tokens 128 128 128 2048 --gen-tokens 256 256 256 16 --batch 1 64 256 1"
    "llama-3-8b 4 -1 $once --batch 1 64 256 --ctx-size 8192"
    "llama-3-8b 8 -1 --prompt-tokens 128 2048 --gen-tokens 256 16"
    "llama-3-8b 16 -1 $once"
  )
  for bits in 8 16; do kinds+=("llama-3.2-1b $bits -1 $once"); done
  for room in "" "--ctx-size 131072"; do kinds+=("llama-3.2-1b 4 -1 $once --batch 1 64 256 $room"); done
  bench_all e2e "${kinds[@]}"
}

families() {  # of each kind of wiring a shape; of those with heads of 96 and 160 a long prompt, too
  local shapes=(gpt-neox-6.9b gemma2-9b falcon-7b bloom-7b gemma3-12b glm4-9b qwen3-8b mistral-7b cohere-35b)
  local heads=(phi3-mini stablelm-12b)
  bench_all e2e.families "${shapes[@]/%/ 4 -1 --prompt-tokens 128 --gen-tokens 256}" \
    "${heads[@]/%/ 4 -1 --prompt-tokens 128 2048 --gen-tokens 256 16}"
}

drafts() {  # decoding with drafts of which a share is right, beside without
  bench_all drafts "llama-3-8b 4 -1 --prompt-tokens 128 --gen-tokens 256 --batch 1 4 16 --speculate ngram"
}

write_record() {
  mkdir -p "$record"
  $python - "$state" "$record" "$tree" << 'PYTHON'
import json, re, subprocess, sys, xml.etree.ElementTree as xml
from pathlib import Path

import torch

state, record, tree = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def outcomes(*paths):  # (file, case) -> how it ended
    found = {}
    for case in (case for path in paths for case in xml.parse(path).getroot().iter("testcase")):
        if not (case.get("classname") or case.get("name")):
            continue  # what was interrupted
        module = (case.get("classname") or case.get("name")).split(".")
        named = next((i for i, part in enumerate(module) if part.startswith("test_")), len(module) - 1) + 1
        file = "/".join(module[:named]) + ".py"
        failed = case.find("failure") is not None or case.find("error") is not None
        how = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        key = file, case.get("classname"), case.get("name")
        found[key] = "failed" if found.get(key) == "failed" else how  # a case whose end fails, too, is there twice
    return found


def counted(*paths):  # file -> its counts
    again = outcomes(*filter(Path.exists, (path.with_suffix(".again.xml") for path in paths)))
    first, files = outcomes(*paths), {}
    cut = {key[0] for path in paths if path.with_suffix(".cut").exists() for key in outcomes(path)}
    known = {key for key in first if key[1] or key[0] not in {file for file, *_ in again}}  # files that could be read now
    cases = {**{key: first[key] for key in known}, **again}
    for key, how in cases.items():
        counts = files.setdefault(key[0], {"passed": 0, "failed": 0, "skipped": 0, "tree": tree})
        counts[how] += 1
        if key in again:
            counts["run again"] = counts.get("run again", 0) + 1
        if key[0] in cut:
            counts["cut off"] = True
    return files


def total(files):
    again = sum(file.get("run again", 0) for file in files.values())
    counts = {how: sum(file[how] for file in files.values()) for how in ("passed", "failed", "skipped")}
    return {**counts, **({"run again": again} if again else {})}


tests = [path for path in state.glob("tests*.xml") if ".again" not in path.suffixes]
driver = subprocess.run(
    ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
).stdout.strip()
summary = {
    "tree": tree,
    "versions": {"gpu and driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
}
path = record / "tests.json"
known = json.loads(path.read_text()) if path.exists() else {}
if not tests and known:  # an earlier run's stays, with its tree
    summary = known
else:
    kept = {file: row for file, row in known.get("files", {}).items() if Path(file).exists()}
    summary["files"] = {**kept, **counted(*tests)}
found = {p.stem: {"result": p.read_text().strip(), "tree": tree} for p in sorted(state.glob("*check*.txt"))}
found = {name: ran for name, ran in found.items() if not re.match(r"0 of .*exit 124:", ran["result"])}  # says nothing
summary["sanitizer"] = {  # all files' takes the place of some files'
    **{name: ran for name, ran in known.get("sanitizer", {}).items() if name.partition(".")[0] not in found},
    **found,
}
for part in ("cards", "schedules"):
    if (state / f"{part}.xml").exists():
        summary[part] = {**total(counted(state / f"{part}.xml")), "tree": tree}
    elif part in known:
        summary[part] = known[part]
path.write_text(json.dumps(summary, indent=1) + "\n")
if (state / "wheel.txt").exists() and (state / "tests.xml").exists():
    path = record.parent / "wheel.json"
    name, size = (state / "wheel.txt").read_text().split()
    passed = {"wheel": Path(name).name, "wheel_bytes": int(size), **total(counted(*tests)), "gpu": driver, "tree": tree}
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "gpu_tests": passed}, indent=1) + "\n")
lines = {"e2e": ("e2e", "e2e.families"), "drafts": ("drafts",)}
results = {
    name: [json.loads(line) for path in files if (state / f"{path}.jsonl").exists() for line in (state / f"{path}.jsonl").open()]
    for name, files in lines.items()
}
for name in ("ops", "latency", "load", "peers", "serve", "convert", "vllm_folders"):
    if (state / f"{name}.json").exists():
        results[name] = json.loads((state / f"{name}.json").read_text())
KEYS = {  # what a row is of: one that was not measured again stays, with its tree
    "e2e": "shape bits group_size activations kv load batch depth prompt_tokens generated_tokens ctx_size",
    "drafts": "shape bits group_size activations kv batch acceptance",
    "peers": "engine quant test batch",
    "serve": "test model kind",
    "convert": "test shape layers method format",
    "vllm_folders": "folder",
}
usual = {"activations": 16, "kv": "bf16"}
for name, rows in results.items():
    if not rows:
        continue
    path, keys = record / f"{name}.json", KEYS.get(name, "").split()
    before = json.loads(path.read_text()) if keys and path.exists() else []
    measured = [{**row, "tree": row.get("tree") or tree} for row in rows]
    again = {tuple(row.get(key, usual.get(key)) for key in keys) for row in measured}
    kept = [row for row in before if tuple(row.get(key, usual.get(key)) for key in keys) not in again]
    path.write_text(json.dumps(measured + kept, indent=1) + "\n")
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
    --vllm) vllm=$2; shift 2 ;;
    --wheel) wheel=$2; shift 2 ;;
    --data) data=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --covering) covering=$1; shift ;;
    --again) again=$2; shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    build | tests | memcheck | racecheck | ops | e2e | latency | load | serve | convert | record) parts+=("$1"); shift ;;
    drafts | families | cards | schedules | peers | vllm-folders) parts+=("$1"); shift ;;
    *) echo "gpu_check: unknown argument '$1'" >&2; sed -n "4,23p" "$0" >&2; exit 2 ;;
  esac
done
for folder in "${folders[@]}"; do
  if [[ $tree != *"$folder="* ]]; then
    echo "gpu_check: pass --tree \"\$(scripts/gpu_check.sh --trees)\", made where git is" >&2
    exit 2
  fi
done
[[ ${#parts[@]} -gt 0 ]] || parts=(build tests memcheck racecheck ops e2e drafts families latency load serve convert record)
mkdir -p "$state"
export PYTHONPATH=$PWD/$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

run_part() {
  case $1 in
    tests) run_tests ;;
    memcheck | racecheck) sanitize "$1" ;;
    ops) bounded $python scripts/bench_ops.py --quick --json "$state/ops.json" --tree "$tree" ;;
    latency) bounded $python scripts/bench_latency.py --json "$state/latency.json" --tree "$tree" ;;
    load) bounded $python scripts/bench_load.py --json "$state/load.json" --tree "$tree" ;;
    serve)
      bounded $python scripts/bench_serve.py --work "$state/serve" --limit "$(left)" --json "$state/serve.json" \
        --tree "$tree" ;;
    vllm-folders) vllm_folders ;;
    record) write_record ;;
    *) $1 ;;
  esac
}

for part in "${parts[@]}"; do
  if [[ $SECONDS -ge $limit && $part != record ]]; then
    echo "== $part: not run, $SECONDS of $limit seconds are over"
    failed=1
    continue
  fi
  echo "== $part"
  begun=$SECONDS status=0
  set +e
  (set -e; run_part "$part")
  status=$?
  set -e
  echo "== $part: $((SECONDS - begun)) s$([[ $status == 0 ]] || echo ", exit code $status")"
  [[ $status == 0 ]] || failed=1
done
exit $failed
