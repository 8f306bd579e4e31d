"""Train sprout and then its draft, export both, and score them: one command on one GPU.

    python tools/sprout/train.py

State lies in --run-dir; the same command goes on from the last checkpoint.  The draft learns sprout's own
next-token distribution (Hinton et al., arXiv:1503.02531), so that it guesses what sprout will say.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import tokenizer as bpe
from data import CONTEXT, ID_MASK, LEARN, START, Shards
from evaluate import evaluate, report
from export import export, load
from heldout import write_heldout
from model import SPROUT, SPROUT_DRAFT, Qwen3, Shape, packed_attention
from optim import Optimizers, schedule

LOG = logging.getLogger("sprout")
# At most this share of a batch's tokens counts in the loss; the rest of the learned ones are let go.
LEARNED_SHARE = 0.4

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents on the device: ids and positions [T], cu_seqlens [documents + 1], and which tokens to
    learn: the places [C] before them and the tokens themselves [C] (-100 where unused)."""

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    places: Tensor
    targets: Tensor

    @classmethod
    def from_codes(cls, codes: np.ndarray, device: torch.device) -> Batch:
        ids = (codes & ID_MASK).astype(np.int64)
        starts = np.flatnonzero(codes & START)
        ends = np.append(starts, len(codes))
        positions = np.arange(len(codes)) - np.repeat(starts, np.diff(ends))
        learned = np.flatnonzero((codes & LEARN > 0) & (codes & START == 0))
        capacity = int(len(codes) * LEARNED_SHARE)
        learned = learned[:capacity]
        places = np.zeros(capacity, dtype=np.int64)
        targets = np.full(capacity, -100, dtype=np.int64)
        places[: len(learned)] = learned - 1
        targets[: len(learned)] = ids[learned]
        arrays = (ids, positions, ends.astype(np.int32), places, targets)
        return cls(*(_to_device(array, device) for array in arrays))


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: where its state lies, how its data is drawn, how long it may take."""

    name: str
    state: Path
    export_to: Path
    shards: Shards
    workers: int
    deadline: float
    save_every: float


class Trainer:
    """A model in training: steps, checkpoints, exports."""

    def __init__(self, run: Run, shape: Shape, device: torch.device, teacher: Qwen3 | None = None) -> None:
        torch.manual_seed(run.shards.seed)
        self.run, self.device = run, device
        self.model = Qwen3(shape).to(device)
        self.optimizers = Optimizers(self.model)
        self.step = 0
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loss = (
            _next_token_loss(self.model, dtype)
            if teacher is None
            else _distillation_loss(self.model, teacher, dtype)
        )
        self.loss: Loss = torch.compile(loss) if device.type == "cuda" else loss
        self._checkpoint = run.state / f"{run.name}.pt"
        if self._checkpoint.exists():
            self._restore()

    @property
    def steps(self) -> int:
        return self.run.shards.num_shards * self.run.shards.batches

    def train(self) -> bool:
        """Train to the end or to the deadline; return whether the end was reached."""
        if self.step >= self.steps:
            return True
        shards, began, first, saved = self.run.shards, time.time(), self.step, time.time()
        for shard in shards.stream(self.step // shards.batches, self.run.workers):
            for codes in shard[self.step % shards.batches :]:
                loss = self._learn(Batch.from_codes(codes, self.device))
                if self.step % 50 == 0 or self.step == self.steps:
                    speed = (self.step - first) * shards.batch_tokens / (time.time() - began)
                    LOG.info(
                        "%s step %d/%d loss %.4f, %.2f M tokens/s",
                        self.run.name,
                        self.step,
                        self.steps,
                        loss,
                        speed / 1e6,
                    )
            if time.time() - saved > self.run.save_every:
                self.save()
                saved = time.time()
            if time.time() > self.run.deadline:
                break
        self.save()
        return self.step >= self.steps

    def save(self) -> None:
        """Write the checkpoint and the export, each whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": self.step,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self._checkpoint)
        export(self.model, self.run.export_to, self.run.shards.tokenizer_file.parent)
        LOG.info("%s saved at step %d", self.run.name, self.step)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.step = state["step"]
        LOG.info("%s goes on from step %d", self.run.name, self.step)

    def _learn(self, batch: Batch) -> Tensor:
        # The number of documents varies from batch to batch and must not recompile the loss.
        torch._dynamo.mark_dynamic(batch.cu_seqlens, 0)
        loss = self.loss(batch.ids, batch.positions, batch.cu_seqlens, batch.places, batch.targets)
        loss.backward()
        self.optimizers.step(schedule(self.step, self.steps))
        self.step += 1
        return loss.detach()


def _next_token_loss(model: Qwen3, dtype: torch.dtype) -> Loss:
    """Cross-entropy over the learned tokens."""

    def loss(ids: Tensor, positions: Tensor, cu_seqlens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        hidden = model(ids, positions, packed_attention(cu_seqlens, CONTEXT), dtype)
        total = F.cross_entropy(model.logits(hidden[places]).float(), targets, reduction="sum")
        return total / (targets >= 0).sum().clamp(min=1)

    return loss


def _distillation_loss(model: Qwen3, teacher: Qwen3, dtype: torch.dtype) -> Loss:
    """Cross-entropy against the teacher's distribution over the learned tokens."""

    def loss(ids: Tensor, positions: Tensor, cu_seqlens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        attend = packed_attention(cu_seqlens, CONTEXT)
        with torch.no_grad():
            wanted = teacher.logits(teacher(ids, positions, attend, dtype)[places]).float().softmax(-1)
        hidden = model(ids, positions, attend, dtype)
        chances = model.logits(hidden[places]).float().log_softmax(-1)
        counted = (targets >= 0).float()
        return -((wanted * chances).sum(-1) * counted).sum() / counted.sum().clamp(min=1)

    return loss


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("pellucid/assets"), help="where sprout/ and sprout-draft/ go"
    )
    parser.add_argument("--run-dir", type=Path, default=Path("build/sprout"), help="checkpoints")
    parser.add_argument("--tokens", type=float, default=2.2e9, help="tokens to train sprout on")
    parser.add_argument("--draft-tokens", type=float, default=5e8, help="tokens to train sprout-draft on")
    parser.add_argument("--batch-tokens", type=int, default=1 << 18)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop, with a checkpoint, after this long")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    return parser.parse_args()


def make_run(options: argparse.Namespace, name: str, deadline: float) -> Run:
    """Lay out the run called `sprout` or `sprout-draft`; each sees its own data."""
    draft = name == "sprout-draft"
    tokens, batches = options.draft_tokens if draft else options.tokens, 8
    shards = Shards(
        tokenizer_file=options.out / "sprout" / "tokenizer.json",
        seed=options.seed + 1000 * draft,
        num_shards=max(1, round(tokens / options.batch_tokens / batches)),
        batches=batches,
        batch_tokens=options.batch_tokens,
    )
    return Run(
        name=name,
        state=options.run_dir,
        export_to=options.out / name,
        shards=shards,
        workers=options.workers,
        deadline=deadline,
        save_every=options.save_every,
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    options = parse_options()
    deadline = time.time() + 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.run_dir.mkdir(parents=True, exist_ok=True)
    sprout_dir, draft_dir = options.out / "sprout", options.out / "sprout-draft"
    if not (sprout_dir / "tokenizer.json").exists():
        bpe.write(bpe.train(bpe.sample_texts(options.seed, bpe.SAMPLE)), sprout_dir)
    if not (sprout_dir / "eval").exists():
        write_heldout(
            sprout_dir / "eval", Tokenizer.from_file(str(sprout_dir / "tokenizer.json")), options.seed
        )

    if not Trainer(make_run(options, "sprout", deadline), SPROUT, device).train():
        return
    teacher = load(sprout_dir, device)
    if not Trainer(make_run(options, "sprout-draft", deadline), SPROUT_DRAFT, device, teacher).train():
        return
    LOG.info("scoring")
    metrics = evaluate(sprout_dir, sprout_dir / "eval", device, draft_dir)
    (options.run_dir / "metrics.json").write_text(
        json.dumps(metrics, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    LOG.info("held-out scores\n%s", report(metrics))


if __name__ == "__main__":
    main()
