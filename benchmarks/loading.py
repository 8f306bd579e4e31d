"""The most memory that loading takes, on a GPU what torch reserves: `python benchmarks/loading.py`.

By default of Qwen3-32B's shape, quantized to FP8 as it loads.  On a CPU it is what the whole process holds.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch

from pellucid import LLM, SamplingParams
from pellucid.worker.worker import Worker

GB = 1e9


def watched(build: Callable[[Worker], None]) -> Callable[[Worker], None]:
    """`build`, which then says what it took."""

    def build_and_tell(worker: Worker) -> None:
        began = time.perf_counter()
        build(worker)
        seconds = time.perf_counter() - began
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if worker.device.type == "cuda":
            most = torch.cuda.max_memory_reserved(worker.device)
        print(f"{most / GB:.2f} GB at most for {worker.weight_bytes / GB:.2f} GB of weights, {seconds:.1f} s")

    return build_and_tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-32b")
    parser.add_argument("--quantization", default="fp8", help="or none")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    Worker._build = watched(Worker._build)
    options = {"device": args.device, "quantization": args.quantization, "max_model_len": 512}
    with LLM(args.model, max_num_seqs=4, **options) as llm:  # answers with what it has loaded
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)


if __name__ == "__main__":
    main()
