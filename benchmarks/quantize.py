"""How long `pellucid quantize` takes a layer of a large shape, and so a model; all numbers are random.

`python benchmarks/quantize.py --shape qwen3-8b --method gptq` writes a checkpoint of two such layers into a
temporary folder, quantizes it, and multiplies the second one's seconds; with `--layers 36` it has all of them
and the shape's vocabulary, 16 GB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import ASSETS, Checkpoint
from pellucid.platform import detect
from pellucid.quantize.base import Recipe
from pellucid.quantize.run import Quantizer, Samples
from pellucid.quantize.stage import Machine

FEW = 1024  # tokens of the vocabulary, if there are not all layers


def write(folder: Path, config: dict, device: torch.device) -> None:
    """Layers of random numbers, a file each; outputs of norms are as large as a model's."""
    dim, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, values = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (queries, dim),
        "self_attn.k_proj": (values, dim),
        "self_attn.v_proj": (values, dim),
        "self_attn.o_proj": (dim, queries),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    table = (config["vocab_size"], dim)
    files = [
        {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        for i in range(config["num_hidden_layers"])
    ]
    files.append({"model.embed_tokens.weight": table, "model.norm.weight": (dim,)})
    if not config["tie_word_embeddings"]:
        files[-1]["lm_head.weight"] = table
    holder: dict[str, str] = {}
    for i, shapes in enumerate(files):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        holder |= dict.fromkeys(shapes, name)
        save_file({key: random(shape, device) for key, shape in shapes.items()}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": holder}))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))


def random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    numbers = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return (numbers.fill_(1) if len(shape) == 1 else numbers.normal_(0, 0.02)).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a layer of `pellucid quantize`.")
    parser.add_argument("--shape", default="qwen3-8b", help="a file in pellucid/assets/shapes")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--sample-length", type=int, default=2048, help="tokens")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    config = json.loads((ASSETS / "shapes" / f"{args.shape}.json").read_text())
    every = config["num_hidden_layers"]
    config["num_hidden_layers"] = min(args.layers, every)
    if args.layers < every:
        config |= {"vocab_size": FEW, "tie_word_embeddings": True}
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, config["vocab_size"], (args.num_samples, args.sample_length), generator=draw
    ).tolist()
    machine = Machine(detect(args.device), torch.device(args.device))
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        plain, out = Path(name) / "plain", Path(name) / "out"
        plain.mkdir()
        write(plain, config, machine.device)
        checkpoint = Checkpoint.open(ModelConfig(model=str(plain), skip_tokenizer_init=True))
        recipe = Recipe(method=args.method)
        start = began = time.perf_counter()

        def tell(done: int) -> None:
            nonlocal began
            now = time.perf_counter()
            seconds.append(now - began)
            began = now

        report = Quantizer(checkpoint, out, recipe, Samples(name="random", learned=ids), machine).run(
            tell=tell
        )
    figures = {
        "shape": args.shape,
        "method": args.method,
        "tokens": args.num_samples * args.sample_length,
        "seconds_of_each_layer": [round(each, 2) for each in seconds],
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "layers": every,
        "minutes_of_all": round(seconds[-1] * every / 60, 2),
        "mean_error": sum(each.error or 0 for each in report.matrices) / len(report.matrices),
    }
    if args.device == "cuda":
        figures["device"] = torch.cuda.get_device_name()
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
