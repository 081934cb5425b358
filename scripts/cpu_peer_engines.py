"""The engines that bench_cpu_peers.py compares, each in a process of its own with its own interpreter.

    python cpu_peer_engines.py nibblelm|llama.cpp|torch MODEL        answers commands until its input ends
    python cpu_peer_engines.py gguf CHECKPOINT FOLDER                 writes bf16.gguf, q4_0.gguf and q8_0.gguf
    python cpu_peer_engines.py footprint FOLDER                       load time, peak memory, share outside kernels

A command is one JSON line {"phase": "prefill" | "decode" | "logits", "threads": n, "tokens": n}, its answer one JSON
line {"seconds": s}; logits also takes "path" and saves those of the prompt's last position there. Decode starts behind
one token in the cache and feeds each greedy choice back; prefill counts from ids to the first chosen token. Only
numpy is needed by all; the llama.cpp process also needs llama_cpp and gguf, the others torch.
"""

import ctypes
import dataclasses
import json
import mmap
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CONTEXT = 1024  # positions that every engine makes room for


class Engine(Protocol):
    """Logits are (vocab,) fp32. `start` empties the cache."""

    vocab: int

    def set_threads(self, count: int) -> None: ...

    def start(self) -> None: ...

    def feed(self, ids: list[int]) -> np.ndarray:
        """Append tokens to the cache; the logits of the last, valid until the next call."""
        ...


# ---------------------------------------------------------------------------------------------- engines


class NibbleLM:
    """The runner of a loaded folder, as `LLM` sets it up by default."""

    def __init__(self, folder: str) -> None:
        import torch

        from nibblelm import LLM, ops

        self._ops, self._torch = ops, torch
        llm = LLM(folder, device="cpu", max_context=CONTEXT, max_sequences=1)
        self._runner = llm.runner
        self._runner.set_pages(0, range(llm.kv_pages))
        self.vocab = self._runner.model.config.vocab_size

    def set_threads(self, count: int) -> None:
        self._ops.set_threads(count)
        self._torch.set_num_threads(count)

    def start(self) -> None:
        self._runner.history[0] = []

    def feed(self, ids: list[int]) -> np.ndarray:
        with self._torch.inference_mode():
            one = len(ids) == 1
            return (self._runner.decode(ids, [0]) if one else self._runner.prefill(ids))[0].numpy()


class LlamaCpp:
    """llama_decode on batches of at most 512, fp16 cache, everything else at llama.cpp's defaults."""

    def __init__(self, path: str) -> None:
        self._lib = lib = quiet_llama_cpp()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, 512, 512
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def set_threads(self, count: int) -> None:
        self._lib.llama_set_n_threads(self._context, count, count)

    def start(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def feed(self, ids: list[int]) -> np.ndarray:
        tokens = (ctypes.c_int32 * len(ids))(*ids)  # a batch of this kind computes the last token's logits alone
        if status := self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama_decode failed with {status}")
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, -1), shape=(self.vocab,))


class TorchInt8:
    """Plain PyTorch: fused projections as dynamic int8 Linear (the default per-tensor scheme), the rest in fp32.

    The matrices are held twice, since oneDNN was the faster back end for prompts (by 14 %) and FBGEMM for single tokens
    (by 12 %) on 2 cores of a Zen 5.
    """

    def __init__(self, folder: str) -> None:
        import torch
        from safetensors import safe_open

        warnings.filterwarnings("ignore")  # torch.ao announces its own replacement
        self._torch, config = torch, json.loads((Path(folder) / "config.json").read_text())
        self.vocab, self._eps = config["vocab_size"], config["rms_norm_eps"]
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._width = width = config["hidden_size"] // self._heads
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            names = set(file.keys())

            def get(name: str) -> Any:
                return file.get_tensor(name).float()

            def linear(*modules: str) -> Any:
                weight = torch.cat([get(f"{m}.weight") for m in modules])
                bias = torch.cat([get(f"{m}.bias") for m in modules]) if f"{modules[0]}.bias" in names else None
                one, many = self._quantized(weight, bias, "fbgemm"), self._quantized(weight, bias, "onednn")
                return lambda x: one(x) if x.shape[0] == 1 else many(x)

            self._layers = []
            for i in range(config["num_hidden_layers"]):
                at = f"model.layers.{i}"
                qkv = linear(*(f"{at}.self_attn.{part}_proj" for part in "qkv"))
                gate_up = linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
                norms = [get(f"{at}.{name}_layernorm.weight") for name in ("input", "post_attention")]
                rest = linear(f"{at}.self_attn.o_proj"), linear(f"{at}.mlp.down_proj")
                self._layers.append((*norms, qkv, rest[0], gate_up, rest[1]))
            self._table = file.get_tensor("model.embed_tokens.weight")
            self._norm = get("model.norm.weight")
            self._head = linear("model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head")
        angles = torch.outer(
            torch.arange(CONTEXT).float(),
            float(config.get("rope_theta", 10000.0)) ** (-torch.arange(0, width, 2).float() / width),
        )
        self._cos, self._sin = (f(torch.cat((angles, angles), 1)) for f in (torch.cos, torch.sin))
        self._cache = torch.zeros(len(self._layers), 2, self._kv_heads, CONTEXT, width)
        self._length = 0

    def _quantized(self, weight: Any, bias: Any, back_end: str) -> Any:
        from torch.ao.nn.quantized.dynamic import Linear

        self._torch.backends.quantized.engine = back_end  # type: ignore[assignment]
        dense = self._torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        dense.weight.data = weight
        if bias is not None:
            dense.bias.data = bias
        dense.qconfig = self._torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
        return Linear.from_float(dense)

    def set_threads(self, count: int) -> None:
        self._torch.set_num_threads(count)

    def start(self) -> None:
        self._length = 0

    def feed(self, ids: list[int]) -> np.ndarray:
        torch, first = self._torch, self._length
        self._length += len(ids)
        f = torch.nn.functional
        with torch.inference_mode():
            x = self._table[torch.tensor(ids)].float()
            for i, (norm, mlp_norm, qkv, o, gate_up, down) in enumerate(self._layers):
                x = x + o(self._attention(qkv(f.rms_norm(x, norm.shape, norm, self._eps)), self._cache[i], first))
                gate, up = gate_up(f.rms_norm(x, mlp_norm.shape, mlp_norm, self._eps)).chunk(2, -1)
                x = x + down(f.silu(gate) * up)
            return self._head(f.rms_norm(x[-1:], self._norm.shape, self._norm, self._eps))[0].numpy()

    def _attention(self, qkv: Any, cache: Any, first: int) -> Any:
        """qkv (M, (H + 2 Hkv) D) -> (M, H D)."""
        torch, count, last = self._torch, qkv.shape[0], first + qkv.shape[0]
        parts = qkv.view(count, -1, self._width).transpose(0, 1)
        q, k, v = parts.split((self._heads, self._kv_heads, self._kv_heads))
        cache[0, :, first:last], cache[1, :, first:last] = self._rotated(k, first, last), v
        k, v = cache[:, :, :last]
        q, more = self._rotated(q, first, last), self._heads // self._kv_heads
        if count == 1:  # query heads of one group as rows of one matrix
            q = q.reshape(self._kv_heads, more, -1)
        else:
            k, v = k.repeat_interleave(more, 0), v.repeat_interleave(more, 0)
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q[None], k[None], v[None], is_causal=count > 1)[0]
        return out.reshape(1, -1) if count == 1 else out.transpose(0, 1).reshape(count, -1)

    def _rotated(self, x: Any, first: int, last: int) -> Any:
        low, high = x.chunk(2, -1)
        return x * self._cos[first:last] + self._torch.cat((-high, low), -1) * self._sin[first:last]


ENGINES: dict[str, Callable[[str], Engine]] = {"nibblelm": NibbleLM, "llama.cpp": LlamaCpp, "torch": TorchInt8}


# ---------------------------------------------------------------------------------------------- commands


def prompt(vocab: int, tokens: int) -> list[int]:
    """The same ids in every engine."""
    return np.random.default_rng(1).integers(0, vocab, tokens).tolist()


def chosen(logits: np.ndarray) -> int:
    token = int(logits.argmax())
    if not np.isfinite(logits[token]):
        raise FloatingPointError(f"the largest logit is {logits[token]}")
    return token


def prefill(engine: Engine, ids: list[int]) -> float:
    engine.start()
    begun = time.perf_counter()
    chosen(engine.feed(ids))
    return time.perf_counter() - begun


def decode(engine: Engine, first: int, tokens: int) -> float:
    engine.start()
    token = chosen(engine.feed([first]))
    begun = time.perf_counter()
    for _ in range(tokens):
        token = chosen(engine.feed([token]))
    return time.perf_counter() - begun


def serve(engine: Engine, commands: Any, answers: Any) -> None:
    for line in commands:
        command = json.loads(line)
        engine.set_threads(command["threads"])
        ids = prompt(engine.vocab, command["tokens"])
        seconds = decode(engine, 1, len(ids)) if command["phase"] == "decode" else prefill(engine, ids)
        if command["phase"] == "logits":
            engine.start()
            np.save(command["path"], engine.feed(ids))
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


# ---------------------------------------------------------------------------------------------- footprint


class TimedProgram:
    """A recorded decode step that adds up the time of its replays."""

    def __init__(self, program: Any) -> None:
        self._program, self.seconds = program, 0.0

    def replay(self) -> None:
        begun = time.perf_counter()
        self._program.replay()
        self.seconds += time.perf_counter() - begun


def memory_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (at most so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def footprint(folder: str) -> dict[str, float]:
    """Of a fresh process: load time beyond `import torch`, peak memory after a prefill of 512, and the share of a
    greedily generated token's time in which no recorded step runs, over 64 tokens of `LLM.stream`."""
    import torch  # noqa: F401  # so that what it takes can be told apart

    torch_bytes, begun = memory_bytes("VmRSS"), time.perf_counter()
    from nibblelm import LLM, SamplingParams

    llm = LLM(folder, device="cpu", max_context=CONTEXT)
    load_s = time.perf_counter() - begun
    greedy, ids = SamplingParams(temperature=0.0, max_tokens=2), prompt(llm.config.vocab_size, 512)
    llm.generate(ids, greedy)
    peak = memory_bytes("VmHWM")
    runner = llm.runner
    step = runner._steps[1, "apart"]
    timed = TimedProgram(step.program)
    runner._steps[1, "apart"] = dataclasses.replace(step, program=timed)
    shares = []
    for _ in range(3):
        pieces = llm.stream(ids[:1], greedy, max_tokens=65)
        next(pieces)  # the prompt's own token
        timed.seconds, begun = 0.0, time.perf_counter()
        for _ in pieces:
            pass
        shares.append(1 - timed.seconds / (time.perf_counter() - begun))
    return {
        "load_s": load_s,
        "torch_bytes": torch_bytes,
        "packed_bytes": llm.weight_bytes,  # the matrices that a token reads
        "file_bytes": (Path(folder) / "model.safetensors").stat().st_size,  # those and the embedding table
        "kv_bytes": llm.kv_bytes_per_token * CONTEXT,
        "peak_bytes": peak,
        "outside_kernels": sorted(shares)[1],
    }


# ---------------------------------------------------------------------------------------------- GGUF files


def quiet_llama_cpp() -> Any:
    import llama_cpp  # type: ignore[import-not-found]

    silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.keep_log_callback = silent  # the library keeps the address alone
    llama_cpp.llama_backend_init()
    return llama_cpp


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """A file of bf16 or fp32 tensors by name: fp32 values of vectors, matrices as stored, bf16 as raw 16-bit words."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "F32":
            found[name] = np.frombuffer(data, np.float32, (end - begin) // 4, 8 + size + begin).reshape(entry["shape"])
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        words = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + size + begin).reshape(entry["shape"])
        found[name] = words if words.ndim == 2 else (words.astype(np.uint32) << 16).view(np.float32)
    return found


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    index, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(checkpoint: Path, path: Path) -> None:
    """The checkpoint in GGUF, without a tokenizer. llama.cpp rotates neighbouring dimensions in the llama
    architecture, so that the rows of q and k are reordered; qwen2 keeps the two halves."""
    import gguf  # type: ignore[import-not-found]

    config = json.loads((checkpoint / "config.json").read_text())
    family, heads = config["model_type"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(path), {"llama": "llama", "qwen2": "qwen2"}[family])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, source in read_safetensors(checkpoint / "model.safetensors").items():
        value = source
        count = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if family == "llama" and count:
            value = source.reshape(count, 2, -1, source.shape[1]).swapaxes(1, 2).reshape(source.shape)
        if value.dtype == np.uint16:
            data = np.ascontiguousarray(value).view(np.uint8)
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(checkpoint: Path, folder: Path, names: tuple[str, ...] = ("q4_0", "q8_0")) -> None:
    """The checkpoint as it is (bf16.gguf), and in llama.cpp's default mixes by its own quantizer."""
    lib, source = quiet_llama_cpp(), folder / "bf16.gguf"
    write_gguf(checkpoint, source)
    for name in names:
        file_type = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
        params = lib.llama_model_quantize_default_params()
        params.ftype = file_type
        if status := lib.llama_model_quantize(bytes(source), bytes(folder / f"{name}.gguf"), ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize failed with {status}")


def main() -> None:
    kind, *paths = sys.argv[1:]
    if kind == "gguf":
        make_gguf(Path(paths[0]), Path(paths[1]))
    elif kind == "footprint":
        print(json.dumps(footprint(paths[0])))
    else:
        serve(ENGINES[kind](paths[0]), sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
