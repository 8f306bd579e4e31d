"""What constrained decoding costs: `python benchmarks/grammars.py [--model sprout] [--device cpu]`.

Answers of JSON schemas, by the bundled model unless told otherwise: its forward pass is so short that hardly
anything of the masks is hidden behind it.  For each number of requests and of distinct schemas the best of
`--repeat` runs, beside the same requests without a grammar.  Every run has schemas that the engine has not
seen, so compiling is included.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import count

from rich.console import Console
from rich.table import Table

from pellucid import LLM, SamplingParams, StructuredOutputsParams

CASES = ((1, 1), (32, 1), (32, 32))  # requests, distinct schemas
NUM_FIELDS = 12
LONGEST_FIELD = 20  # characters
unseen = count()


def schema() -> str:
    """A schema that no engine has compiled before."""
    number = next(unseen)
    fields = {
        f"field_{number}_{i}": {"type": "string", "maxLength": LONGEST_FIELD} for i in range(NUM_FIELDS)
    }
    return json.dumps(
        {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    )


def run(llm: LLM, num_requests: int, num_schemas: int, num_tokens: int) -> tuple[float, float]:
    """Milliseconds a step and output tokens a second.  num_schemas: 0 for plain answers."""
    schemas = [schema() for _ in range(num_schemas)]
    params = [
        SamplingParams(
            temperature=0.8,
            max_tokens=num_tokens,
            seed=i,
            ignore_eos=not schemas,
            structured_outputs=StructuredOutputsParams(json=schemas[i % num_schemas]) if schemas else None,
        )
        for i in range(num_requests)
    ]
    steps = llm.llm_engine.stats.num_steps
    began = time.perf_counter()
    outputs = llm.generate(["Answer: "] * num_requests, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    steps = llm.llm_engine.stats.num_steps - steps
    sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
    return 1000 * seconds / steps, sampled / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-tokens", type=int, default=200, help="of an answer, at most (200)")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    table = Table("requests", "schemas", "ms/step", "output tok/s", "plain ms/step", "plain tok/s")
    with LLM(options.model, device=options.device) as llm:
        run(llm, 1, 1, options.num_tokens)  # the processes that compile have started then
        for num_requests, num_schemas in CASES:
            asked = num_requests, num_schemas, options.num_tokens
            runs = [run(llm, *asked) for _ in range(options.repeat)]
            plain = [run(llm, num_requests, 0, options.num_tokens) for _ in range(options.repeat)]
            best = min(runs), max(rate for _, rate in runs), min(plain), max(rate for _, rate in plain)
            figures = [f"{best[0][0]:.2f}", f"{best[1]:.0f}", f"{best[2][0]:.2f}", f"{best[3]:.0f}"]
            table.add_row(str(num_requests), str(num_schemas), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
