"""Write the bundled model's calibration texts: documents of its training mixture, none of them held out.

`python tools/sprout/calibration.py` writes `pellucid/assets/sprout/calibration.jsonl`, a `text` a line.  A quarter
is Python, of which the training had less: its text is the most varied.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from data import documents
from tasks.python_text import python_text

OUT = Path(__file__).parents[2] / "pellucid" / "assets" / "sprout" / "calibration.jsonl"
PROGRESS = 0.05  # of the training, by which tables have up to a thousand tokens
PYTHON_CHARS = 2400


def texts(seed: int, num: int) -> Iterator[str]:
    """`num` texts, every fourth of them Python."""
    rng = Random(f"calibration:{seed}")
    mixture = documents(rng, PROGRESS)
    for i in range(num):
        drawn = python_text(rng, max_chars=PYTHON_CHARS) if i % 4 == 3 else next(mixture)
        yield drawn.prompt + drawn.completion


def main() -> None:
    parser = argparse.ArgumentParser(description="Write calibration texts.")
    parser.add_argument("--num", type=int, default=160, help="texts")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--out", type=Path, default=OUT, help="file")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for text in texts(args.seed, args.num):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
