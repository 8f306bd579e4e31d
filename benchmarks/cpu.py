"""Pellucid beside llama.cpp on two cores, in one run and by turns: Qwen3-0.6B's shape, random weights.

    pip install llama-cpp-python
    OMP_PROC_BIND=close OMP_PLACES=cores python benchmarks/cpu.py

Each engine is a process of its own on the same two cores, and one sleeps while the other has its turn.  A
turn is a prompt of 512 tokens, some decodes behind it, and some decodes of 16 requests; of all turns the
table has the fastest and the median step.  Of Pellucid a step is all of it, from the plan to the tokens; of
llama.cpp it is llama_decode alone, without sampling.  With one core (`--cores 0`) it is not the time that
passes, but that which the process has the core for: so others who use it, too, disturb less.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ENVIRONMENT = dict(os.environ)  # as it is before pellucid is imported
SHAPE = "shape:qwen3-0.6b"
PROMPT, REQUESTS, SHORT = 512, 16, 8  # tokens, requests, tokens of each of theirs
PAIRS = {  # weights: Pellucid's option, llama.cpp's file
    "bf16": ("none", "BF16"),
    "int8": ('{"linear": "int8", "head": "int8"}', "Q8_0"),
    "int4": ('{"linear": "int4", "head": "int8"}', "Q4_0"),
    "int4, int4 head": ('{"linear": "int4", "head": "int4"}', "Q4_K_M"),
}
FTYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.cpp's numbers
clock = time.perf_counter
Times = dict[str, list[float]]  # seconds by what was timed


def tokens(num: int) -> list[int]:
    return [random.randrange(1000, 100_000) for _ in range(num)]


class Pellucid:
    """A turn through the engine, a step at a time."""

    def __init__(self, quantization: str, threads: int) -> None:
        from pellucid import LLMEngine

        self.engine = LLMEngine.from_options(
            model=SHAPE, device="cpu", dtype="bfloat16", load_format="dummy", max_num_seqs=REQUESTS,
            max_model_len=2048, max_num_batched_tokens=2048, cpu_kv_cache_gib=1.0, num_threads=threads,
            enable_prefix_caching=False, quantization=None if quantization == "none" else quantization,
        )  # fmt: skip
        self.num = 0

    def turn(self, steps: int) -> Times:
        one, many = self.decode(1, PROMPT, steps), self.decode(REQUESTS, SHORT, steps // 2)
        return {"prompt": one[:1], "one": one[1:], "many": many[-(steps // 2) :]}

    def decode(self, num: int, length: int, steps: int) -> list[float]:
        """Seconds of the step with the prompts and of those behind it."""
        from pellucid import SamplingParams

        for _ in range(num):
            self.num += 1
            params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
            self.engine.add_request({"prompt_token_ids": tokens(length)}, params, request_id=str(self.num))
        times = []
        while self.engine.has_unfinished_requests():
            began = clock()
            self.engine.step()
            times.append(clock() - began)
        return times


class LlamaCpp:
    """The same through llama.cpp's own interface."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.lib, self.quiet = llama_cpp, llama_cpp.llama_log_callback(lambda *_: None)
        self.lib.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 2048, 512, REQUESTS
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = self.lib.llama_init_from_model(self.model, params)
        assert self.context, path

    def turn(self, steps: int) -> Times:
        one, many = self.decode(1, PROMPT, steps), self.decode(REQUESTS, SHORT, steps // 2)
        return {"prompt": one[:1], "one": one[1:], "many": many[1:]}

    def decode(self, num: int, length: int, steps: int) -> list[float]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        prompts = [(i, seq, i == length - 1) for seq in range(num) for i in range(length)]
        times = [self.run(prompts)]
        for step in range(steps):
            times.append(self.run([(length + step, seq, True) for seq in range(num)]))
        return times

    def run(self, places: list[tuple[int, int, bool]]) -> float:
        """places: position, sequence, and whether logits are wanted."""
        batch = self.lib.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for i, (token, (position, sequence, is_wanted)) in enumerate(
            zip(tokens(len(places)), places, strict=True)
        ):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, is_wanted
        began = clock()
        failed = self.lib.llama_decode(self.context, batch)
        self.lib.llama_synchronize(self.context)
        seconds = clock() - began
        assert failed == 0, failed
        self.lib.llama_batch_free(batch)
        return seconds


ENGINES: dict[str, Callable[[str, int], Pellucid | LlamaCpp]] = {"Pellucid": Pellucid, "llama.cpp": LlamaCpp}


def serve(name: str, what: str, threads: int) -> None:
    """The life of an engine's process: a line is a turn."""
    global clock  # noqa: PLW0603
    clock = time.process_time if threads == 1 else time.perf_counter
    engine = ENGINES[name](what, threads)
    engine.turn(4)
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.turn(int(line))), file=sys.__stdout__, flush=True)


class Process:
    """An engine on its cores."""

    def __init__(self, name: str, what: str, cores: list[int]) -> None:
        self.name = name
        self.times: Times = {}
        environment = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"} | ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(len(cores))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, what, "--cores", *map(str, cores)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.heard = self.lines()
        assert next(self.heard) == "ready\n", name

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        yield from self.process.stdout

    def turn(self, steps: int) -> None:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        for what, times in json.loads(next(self.heard)).items():
            self.times.setdefault(what, []).extend(times)

    def rates(self) -> dict[str, tuple[float, float]]:
        """Tokens a second by what was timed: of the fastest step and of the median one."""
        num = {"prompt": PROMPT, "one": 1, "many": REQUESTS}
        return {
            what: (num[what] / min(times), num[what] / statistics.median(times))
            for what, times in self.times.items()
        }


def write_checkpoint(path: Path) -> None:
    """A BF16 file of the shape, with random weights and no tokenizer."""
    import torch

    from pellucid.weights.gguf_writer import Written, write_gguf

    dim, hidden, layers, heads, kv_heads, head, vocab = 1024, 3072, 28, 16, 8, 128, 151_936
    keys = {
        "general.architecture": "qwen3", "general.file_type": 32, "tokenizer.ggml.model": "none",
        "qwen3.vocab_size": vocab, "qwen3.block_count": layers, "qwen3.context_length": 4096,
        "qwen3.embedding_length": dim, "qwen3.feed_forward_length": hidden,
        "qwen3.attention.head_count": heads, "qwen3.attention.head_count_kv": kv_heads,
        "qwen3.attention.key_length": head, "qwen3.attention.value_length": head,
        "qwen3.rope.freq_base": 1e6, "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, dim), "output_norm": (dim,)}
    for i in range(layers):
        sizes |= {
            f"blk.{i}.{name}": size
            for name, size in {
                "attn_norm": (dim,), "ffn_norm": (dim,), "attn_q_norm": (head,), "attn_k_norm": (head,),
                "attn_q": (heads * head, dim), "attn_k": (kv_heads * head, dim),
                "attn_v": (kv_heads * head, dim), "attn_output": (dim, heads * head),
                "ffn_gate": (hidden, dim), "ffn_up": (hidden, dim), "ffn_down": (dim, hidden),
            }.items()
        }  # fmt: skip

    def reader(size: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        return lambda: torch.ones(size) if len(size) == 1 else (torch.randn(size) * 0.02).bfloat16()

    tensors = {
        f"{name}.weight": Written(size, "F32" if len(size) == 1 else "BF16", reader(size))
        for name, size in sizes.items()
    }
    write_gguf(path, keys, tensors)


def quantize(source: Path, kind: str, threads: int) -> Path:
    """A file of another kind, by llama.cpp's own quantization."""
    import llama_cpp

    target = source.with_name(f"{kind}.gguf")
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = FTYPES[kind], threads
        failed = llama_cpp.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        assert failed == 0, failed
    return target


def compare(args: argparse.Namespace) -> None:
    folder = Path(args.folder or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "BF16.gguf"
    if not plain.exists():
        write_checkpoint(plain)
    print(f"cores {args.cores}, {args.rounds} turns each of {args.steps} steps; fastest / median step, tok/s")
    print("| weights | engine | 1 request | prompt of 512 | 16 requests |\n|---|---|---|---|---|", flush=True)
    for pair in args.weights:
        quantization, kind = PAIRS[pair]
        path = plain if kind == "BF16" else quantize(plain, kind, len(args.cores))
        processes = [
            Process("Pellucid", quantization, args.cores), Process("llama.cpp", str(path), args.cores),
        ]  # fmt: skip
        for _ in range(args.rounds):
            for process in processes:
                process.turn(args.steps)
        for process, what in zip(processes, (pair, kind), strict=True):
            rates = process.rates()
            cells = " | ".join("{:.1f} / {:.1f}".format(*rates[each]) for each in ("one", "prompt", "many"))
            print(f"| {what} | {process.name} | {cells} |", flush=True)
            process.process.terminate()
            process.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="decodes of one request in a turn")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--folder", help="where llama.cpp's files are kept")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, args.cores)
    if args.serve:
        serve(*args.serve, len(args.cores))
    else:
        compare(args)


if __name__ == "__main__":
    main()
