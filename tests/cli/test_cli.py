"""The command line as a person types it: streams, exit codes, one-line errors, start-up time."""

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "nibblelm"]
TIMEOUT_S = 600  # only ends what hangs


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> str:
    return str(data_dir / "checkpoints" / "stories260K")


@pytest.fixture(scope="module")
def chatty(stories: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """stories260K with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(stories, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return str(folder)


def test_text_goes_to_stdout_and_the_rest_to_stderr(stories: str) -> None:
    result = run("generate", "-m", stories, "-p", "Once upon a time", "-n", "20", "--temp", "0", "--echo")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once upon a time, there was")
    assert "tok/s" in result.stderr
    assert "peak memory" in result.stderr
    assert "tok/s" not in result.stdout
    bounded = ("--kv-memory", "1M", "--dtype", "fp32")
    without = run("generate", "-m", stories, "-p", "Once upon a time", "-n", "20", "--temp", "0", *bounded)
    assert "keys and values: 0.9 MiB for 768 tokens" in without.stderr
    assert "Once upon a time" + without.stdout == result.stdout


def test_prompt_from_stdin_file_and_json(stories: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    options = ("-m", stories, "-n", "8", "--temp", "0")
    from_file = run("generate", *options, "-f", str(tmp_path / "prompt.txt"))
    (tmp_path / "prompt.txt").write_text("Once upon a time", encoding="utf-8-sig")
    marked = run("generate", *options[1:], "-f", str(tmp_path / "prompt.txt"))  # the model by its place
    assert marked.stdout == from_file.stdout
    from_stdin = run("generate", *options, "-p", "-", stdin="Once upon a time")
    as_json = run("generate", *options, "-p", "Once upon a time", "--json")
    assert from_file.stdout == from_stdin.stdout
    output = json.loads(as_json.stdout)
    assert output["text"] + "\n" == from_file.stdout
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == output["timings"]["generated_tokens"] == 8


@pytest.mark.parametrize(
    ("given", "means"), [("{}\n", "{}"), ("{}\r\n", "{}"), ("{}\n\n", "{}\n"), ("a\r\n{}", "a\r\n{}")]
)
def test_prompt_bytes_count_but_for_one_line_end(given: str, means: str, stories: str, tmp_path: Path) -> None:
    options = ("-m", stories, "-n", "2", "--temp", "0", "--json")
    text = given.format("Once upon a time")
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    piped = subprocess.run(
        [*COMMAND, "generate", *options, "-p", "-"],
        input=text.encode(),
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    from_file = run("generate", *options, "-f", str(tmp_path / "prompt.txt"))
    for output in (json.loads(piped.stdout), json.loads(from_file.stdout)):
        assert output["prompt"] == means.format("Once upon a time")


def test_prompts_that_cannot_be_read_are_one_line(stories: str, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"na\xefve")
    command = [*COMMAND, "generate", "-m", stories]
    results = [
        subprocess.run(
            [*command, "-f", str(tmp_path / "latin1.txt")], capture_output=True, check=False, timeout=TIMEOUT_S
        ),
        subprocess.run([*command, "-p", "-"], input=b"na\xefve", capture_output=True, check=False, timeout=TIMEOUT_S),
        subprocess.run(
            [*command, "-p", "-"], preexec_fn=lambda: os.close(0), capture_output=True, check=False, timeout=TIMEOUT_S
        ),
    ]
    for result, message in zip(
        results, (b"latin1.txt, byte 2: 0xef", b"standard input, byte 2", b"closed"), strict=True
    ):
        assert result.returncode == 1
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "required"),
        (("generate",), 2, "required"),
        (("generate", "-m", "x", "-p", "a", "--temp", "hot"), 2, "temp"),
        (("generate", "-m", "x", "-p", "a", "--threads", "0"), 2, "at least 1"),
        (("bench", "-m", "x", "--threads", "0"), 2, "at least 1"),
        (("generate", "-m", "x", "-p", "a", "--kv-memory", "8X"), 2, "--kv-memory"),
        (("generate", "-m", "{stories}", "-p", "a", "--kv-memory", "1K"), 1, "hold 0 tokens"),
        (("dance",), 2, "dance"),
        (("generate", "-m", "/nowhere/model", "-p", "a"), 1, "/nowhere/model"),
        (("generate", "-m", "{stories}", "-f", "/nowhere/prompt.txt"), 1, "/nowhere/prompt.txt"),
        (("generate", "-m", "{stories}", "-p", "a", "--temp", "-1"), 1, "temperature"),
        (("generate", "-m", "{stories}", "-p", "a", "--top-p", "7"), 1, "top_p"),
        (("generate", "-m", "{stories}", "-p", "a", "--ctx-size", "100000"), 1, "512"),
        (("generate", "-m", "{stories}", "-p", "a", "--system", "Be brief"), 1, "chat template"),
        (("chat", "-m", "{stories}"), 1, "chat template"),
        (("info", "-m", "{stories}/model.safetensors"), 1, "model.safetensors"),
        (("info", "{stories}", "-m", "x"), 2, "beside -m 'x'; give one of them"),
        (("info", "x", "--supported"), 2, "MODEL beside --supported"),
        (("generate", "-m", "{stories}", "--promt", "hi", "-p", "x"), 2, "unrecognized arguments: --promt"),
        (("generate", "-m", "{stories}", "--promt", "hi"), 2, "unrecognized arguments: --promt"),
        (("generate", "-m", "{stories}"), 2, "one of -p/--prompt and -f/--file is required"),
        (("info",), 2, "required"),
    ],
)
def test_expected_failures_are_one_line(args: tuple[str, ...], code: int, message: str, stories: str) -> None:
    result = run(*(a.replace("{stories}", stories) for a in args))
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    if code == 1:
        assert len(result.stderr.strip().splitlines()) == 1


def test_too_many_threads_are_one_warning(stories: str) -> None:
    result = run("generate", "-m", stories, "-p", "Once", "-n", "3", "--threads", "100000")
    assert result.returncode == 0
    assert len([line for line in result.stderr.splitlines() if "100000 threads" in line]) == 1


def test_json_schema_is_read_from_a_file(stories: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array", "items": {"enum": ["grün", 7]}, "maxItems": 3}')
    options = ("-m", stories, "-p", "Once", "--seed", "1", "--json-schema")
    result = run("generate", *options, str(tmp_path / "schema.json"))
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert len(answer) <= 3
    assert set(answer) <= {"grün", 7}
    (tmp_path / "wrong.json").write_text('{"type": "strange"}')
    (tmp_path / "text.json").write_text("{type: string}")
    (tmp_path / "number.json").write_text("7")
    (tmp_path / "any.json").write_text("true", encoding="utf-8-sig")
    cut = run("generate", *options, str(tmp_path / "any.json"), "-n", "1")
    assert (cut.returncode, "cut off before its JSON ends" in cut.stderr) == (0, True)
    (tmp_path / "latin1.json").write_bytes(b'{"enum": ["gr\xfcn"]}')
    for name, message in (
        ("wrong.json", "the schema cannot be"),
        ("text.json", "text.json is not JSON"),
        ("number.json", "number.json is no JSON schema"),
        ("latin1.json", "latin1.json, byte 13: 0xfc is not UTF-8"),
        ("none.json", "No such file"),
    ):
        result = run("generate", *options, str(tmp_path / name))
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) <= 2  # what was loaded, and the error


def test_drafts_change_no_text(stories: str) -> None:
    options = ("generate", "-m", stories, "-p", "the cat sat on the mat and the cat sat", "-n", "60", "--seed", "3")
    plain, drafts = run(*options), run(*options, "--speculate", "ngram")
    assert plain.returncode == drafts.returncode == 0, drafts.stderr
    assert drafts.stdout == plain.stdout
    assert re.search(r"drafts: \d+ of \d+ tokens right", drafts.stderr)
    assert "drafts" not in plain.stderr


def test_bench_measures_drafts(
    stories: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a first run's text as it was, most drafts are accepted; of one with every token changed, none."""
    from nibblelm import benchmark
    from nibblelm.cli import main

    quick = partial(benchmark.measure_drafts, repeats=1, seconds=0.01, warmup=0)
    monkeypatch.setattr(benchmark, "measure_drafts", quick)
    load = ["--prompt-tokens", "40", "--gen-tokens", "60", "--batch", "1", "--device", "cpu"]
    drafts = ["--speculate", "ngram", "--acceptance", "1", "0"]
    assert main(["bench", "-m", stories, *load, *drafts, "--json"]) == 0
    whole, spoiled = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert whole["ids_hash"] == spoiled["ids_hash"]
    assert whole["accepted_tokens"] > 0.8 * whole["draft_tokens"] > 30
    assert spoiled["draft_tokens"] > spoiled["accepted_tokens"] == 0
    assert main(["bench", "-m", stories, *load, *drafts]) == 0
    assert "100 % of it as it was" in capsys.readouterr().out
    assert main(["bench", "-m", stories, *load, *drafts[2:]]) == 1
    assert "--acceptance is of drafts: add --speculate ngram" in capsys.readouterr().err


def test_bench_of_a_model_takes_no_format(stories: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nibblelm.cli import main

    assert main(["bench", "-m", stories, "--bits", "8"]) == 1
    assert "--bits and --group-size are of --shape" in capsys.readouterr().err
    assert main(["bench", "-m", stories, "--random-weights"]) == 1
    assert "--random-weights, --bits and --group-size are of --shape" in capsys.readouterr().err
    assert main(["bench", "--shape", "llama-3.2-1b", "--bits", "16", "--group-size", "128"]) == 1
    assert "leave it out with --bits 16" in capsys.readouterr().err


def test_bench_fits_its_default_load_to_the_context(stories: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nibblelm.cli import build_parser, main
    from nibblelm.cli.bench import _loads

    def loads(*flags: str, limit: int = 512) -> list[tuple[int, int, int]]:
        made = _loads(build_parser().parse_args(["bench", "-m", stories, *flags]), limit)
        return [(load.depth, load.prompt_tokens, load.generated_tokens) for load in made]

    assert loads() == [(0, 384, 128)]
    assert loads(limit=4096) == [(0, 512, 128)]
    assert loads("--depth", "300") == [(300, 159, 53)]
    assert loads("--prompt-tokens", "500") == [(0, 500, 12)]
    assert loads("--gen-tokens", "500", "9") == [(0, 12, 500), (0, 503, 9)]
    assert loads("--prompt-tokens", "400", "--gen-tokens", "300") == [(0, 400, 300)]
    assert main(["bench", "-m", stories, "--prompt-tokens", "400", "--gen-tokens", "300"]) == 1
    assert "700" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_bench")
@pytest.mark.parametrize("flags", [["--no-graph", "--batch", "2"], ["--gen-tokens", "1"]])
def test_bench_without_a_program_that_ran(stories: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from nibblelm.cli import main

    assert main(["bench", "-m", stories, "--prompt-tokens", "10", "--gen-tokens", "5", *flags]) == 0
    shown = capsys.readouterr().out
    assert "kernels per step" not in shown
    assert ("not measured" in shown) == (flags[0] == "--gen-tokens")


def test_an_output_that_knows_no_such_character(stories: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "generate", "-m", stories, "-p", "Once ☀", "-n", "4", "--echo"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (result.returncode, result.stdout[:11]) == (0, r"Once \u2600"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--threads", "abc"], "must be a whole number of at least 1, got 'abc'"),
        (["serve", "m", "--port", "x"], "must be 0 to 65535, got 'x'"),
        (["serve", "m", "--timeout", "-1"], "must be more than 0 and at most 1000000 seconds, got '-1'"),
    ],
)
def test_numbers_that_are_none(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def test_memory_that_there_is_not(stories: str) -> None:
    result = run("generate", "-m", stories, "-p", "a", "--kv-memory", "1e30")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "--kv-memory" in result.stderr


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("info", "-m", "/nowhere/model", "--debug").stderr


def test_cuda_is_never_a_silent_cpu_run(stories: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    result = run("generate", "-m", stories, "-p", "a", "--device", "cuda")
    assert result.returncode == 1
    assert "cuda" in result.stderr.lower()


def test_version_info_and_doctor(stories: str) -> None:
    import nibblelm

    assert run("--version").stdout.strip() == f"nibblelm {nibblelm.__version__}"
    info = json.loads(run("info", "-m", stories, "--json").stdout)
    assert (info["model_type"], info["context"], info["layers"]) == ("llama", 512, 5)
    assert info["bits_per_weight"] == pytest.approx(32.0)
    assert info["kv_bytes_per_1k_tokens"] == 1000 * 2 * 5 * 4 * 8 * 2
    assert "5 layers" in run("info", "-m", stories).stdout
    (Path(stories) / "nibblelm.json").write_text("{")  # a record that cannot be read is no reason to say nothing
    broken = run("info", "-m", stories)
    (Path(stories) / "nibblelm.json").unlink()
    assert broken.returncode == 0, broken.stderr
    assert broken.stdout.splitlines()[-1] == "nibblelm.json    is not as nibblelm convert writes it"
    doctor = run("doctor")
    assert doctor.returncode == 0
    assert "CPU kernels: " in doctor.stdout
    assert "CUDA kernels: " in doctor.stdout


def takes(command: list[str], seconds: float) -> bool:
    """Whether the command takes so much processor time at most, in one of ten runs: a busy machine stretches it."""

    def once() -> float:
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0, result.stderr
        return ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime

    return any(once() <= seconds for _ in range(10))


def test_help_is_quick() -> None:
    """Reading --help waits for nothing."""
    assert takes([*COMMAND, "--help"], 0.3)


def test_generate_starts_quickly_and_without_transformers(stories: str) -> None:
    """100 tokens from a cold process in 4 s on two cores."""
    code = "import sys; from nibblelm.cli import main; assert main() == 0; assert 'transformers' not in sys.modules"
    args = ["generate", "-m", stories, "-p", "Once", "-n", "100", "--ignore-eos"]
    assert takes([sys.executable, "-c", code, *args], 4)


def test_interrupt_ends_a_generation_cleanly(stories: str) -> None:
    args = ["generate", "-m", stories, "-p", "Once", "-n", "-1", "--ignore-eos", "--temp", "1"]
    process = subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    # a short story may have reached the context limit before the signal arrived; and while the interpreter ends, when
    # Python's handlers are gone, the signal itself ends the process
    assert process.returncode in (130, 0, -signal.SIGINT)
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("command", "module"),
    [("generate", m) for m in ("nibblelm.cli", "argparse", "numpy", "torch", "nibblelm.engine", "tokenizers")]
    + [("chat", "torch"), ("chat", "tokenizers"), ("convert", "torch")],
)
def test_interrupt_during_an_import(command: str, module: str, chatty: str, tmp_path: Path) -> None:
    """Ctrl-C while the module is being looked for: neither swallowed nor a traceback."""
    code = f"""if True:
        import os, signal, sys
        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "{module}":
                    sys.meta_path.remove(Finder)
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Finder)
        from nibblelm.__main__ import run
        run()
    """
    args = {
        "generate": ("-m", chatty, "-p", "Once"),
        "chat": ("-m", chatty),
        "convert": (chatty, str(tmp_path / "out"), "--bits", "8"),
    }[command]
    result = subprocess.run(
        [sys.executable, "-c", code, command, *args], input="", capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (130, "\nnibblelm: interrupted\n")


def test_a_closed_pipe_is_quiet(stories: str) -> None:
    shell = " ".join(f"'{c}'" for c in COMMAND)
    line = f"{shell} generate -m '{stories}' -p Once -n 200 --ignore-eos | head -c 5"
    result = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert "Traceback" not in result.stderr


def test_chat_session(chatty: str) -> None:
    options = ("chat", "-m", chatty, "--temp", "0", "-n", "12")
    reset = run(*options, stdin="Once upon a time\n/reset\n/help\nOnce upon a time\n/exit\n")
    assert reset.returncode == 0, reset.stderr
    assert "unknown command: /reset forgets" in reset.stderr
    first, second = reset.stdout.strip().splitlines()
    assert first == second
    tokens = [int(n) for n in re.findall(r"prompt: (\d+) tokens", reset.stderr)]
    assert tokens[0] == tokens[1]
    kept = run(*options, stdin="Once upon a time\nOnce upon a time\n")
    tokens = [int(n) for n in re.findall(r"prompt: (\d+) tokens", kept.stderr)]
    assert tokens[1] > 2 * tokens[0], "the second prompt holds the first and its answer"


def test_chat_forgets_its_oldest_turns_when_the_context_is_full(chatty: str) -> None:
    long = "the cat and the dog sat on the mat and looked at the red ball. " * 8
    lines = [long, long, long, long, "x" * 3000, "na\udcefve", "Once upon a time", "/reset", "Once upon a time"]
    result = subprocess.run(
        [*COMMAND, "chat", "-m", chatty, "--temp", "0", "-n", "12", "--system", "Be brief."],
        input="\n".join(lines).encode(errors="surrogateescape"), capture_output=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    errors = result.stderr.decode()
    assert result.returncode == 0, errors
    assert "forgot the oldest 1 turns" in errors
    assert errors.count("nibblelm: error: ") == 2, errors  # the one too long, and the one that is not UTF-8
    assert "leaves no room" in errors
    before = errors[: errors.index("leaves no room")].splitlines()
    assert not any("forgot" in line for line in before[-2:]), "nothing is forgotten for what has no room alone"
    prompts = [int(n) for n in re.findall(r"prompt: (\d+) tokens", errors)]
    assert len(prompts) == 6
    assert all(n <= 512 - 12 for n in prompts)
    assert prompts[-1] < prompts[-2], "/reset forgets"


def test_chat_in_a_terminal(chatty: str) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "-m", chatty, "--temp", "0", "-n", "8"], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    os.write(leader, b"Once upon a time\n/exit\n")
    seen = b""
    try:
        while chunk := os.read(leader, 4096):
            seen += chunk
    except OSError:  # the terminal closes with the process
        pass
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert b"tok/s" in seen


def test_raw_leaves_the_template_out(chatty: str) -> None:
    options = ("-m", chatty, "-p", "Once upon a time", "-n", "5", "--temp", "0", "--json")
    template, raw = (json.loads(run("generate", *options, *more).stdout) for more in ((), ("--raw",)))
    assert template["timings"]["prompt_tokens"] != raw["timings"]["prompt_tokens"]
