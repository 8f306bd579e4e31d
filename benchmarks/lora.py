"""What adapters cost: `python benchmarks/lora.py [--model shape:qwen3-8b] [--adapters 8] [--rank 16]`.

Random adapters of all linear layers, as files in peft's layout.  Milliseconds a step of `--requests` decodes,
of the whole run over its steps: the engine without room for adapters, with room and nobody asking, with one
adapter for all, and with `--adapters` of them in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from pellucid import LLM, LoRARequest, SamplingParams
from pellucid.config import EngineConfig
from pellucid.models.checkpoint import Checkpoint


def write_adapter(folder: Path, config: dict, rank: int, seed: int) -> Path:
    """Random A and B for every projection of every layer, on the scale of trained ones."""
    generator = torch.Generator().manual_seed(seed)
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head, inner = config.get("head_dim", dim // heads), config["intermediate_size"]
    num_kv = config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (dim, heads * head),
        "self_attn.k_proj": (dim, num_kv),
        "self_attn.v_proj": (dim, num_kv),
        "self_attn.o_proj": (heads * head, dim),
        "mlp.gate_proj": (dim, inner),
        "mlp.up_proj": (dim, inner),
        "mlp.down_proj": (inner, dim),
    }
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            for kind, shape in (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{path}.{kind}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def milliseconds(llm: LLM, args: argparse.Namespace, adapters: Sequence[Path]) -> float:
    """A step of all requests, the median of `--repeat` runs, after one that warms up."""
    wishes = [
        LoRARequest(adapters[i % len(adapters)].name, 1, str(adapters[i % len(adapters)]))
        if adapters
        else None
        for i in range(args.requests)
    ]
    sampling = SamplingParams(temperature=0.6, max_tokens=args.output_len, ignore_eos=True)
    found: list[float] = []
    for turn in range(args.repeat + 1):
        prompts = [[(i + turn) % 97 + 1] + [5] * (args.input_len - 1) for i in range(args.requests)]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=wishes)
        found.append(1000 * (time.perf_counter() - began) / args.output_len)
        assert not any(output.error for output in outputs), [output.error for output in outputs]
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shape:qwen3-8b")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    options = {"model": args.model, "max_model_len": args.input_len + args.output_len + 64}
    table = Table("requests", "engine", "adapters in use", "ms a step", "of the base")
    with tempfile.TemporaryDirectory() as folder:
        config = dict(Checkpoint.open(EngineConfig.from_options(options).model).config)
        adapters = [
            write_adapter(Path(folder) / f"adapter{i}", config, args.rank, i) for i in range(args.adapters)
        ]
        with LLM(**options) as llm:
            base = milliseconds(llm, args, [])
        table.add_row(str(args.requests), "without room", "0", f"{base:.3f}", "1")
        with LLM(**options, enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank) as llm:
            for used in ([], adapters[:1], adapters):
                took = milliseconds(llm, args, used)
                table.add_row(
                    str(args.requests), "with room", str(len(used)), f"{took:.3f}", f"{took / base:.3f}"
                )
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
