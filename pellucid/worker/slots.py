"""The state of running requests on the device, one slot each: token ids, lengths, block tables.

The device owns the token ids: the sampler's choice is written here and read by the next step without a visit
to the host.  Committed tokens and drafts lie in the same row.  One spare slot takes what belongs to nobody.
How tokens are chosen is kept beside, in sample/state.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.kernels.slots.advance_slots import (
    advance_slots,
    advance_slots_ref,
    append_ref,
    write_drafts,
    write_drafts_ref,
)
from pellucid.kv.layout import Layout
from pellucid.platform import has_triton
from pellucid.rows import SlotRows, Trees
from pellucid.sample.output import SampleOutput
from pellucid.schedule.plan import Admission, Growth
from pellucid.spec.base import NO_DRAFTS, Drafts, DraftShape
from pellucid.transfer import upload
from pellucid.worker.feedback import Feedback


class Slots:
    """Per-slot tensors, written at admission and advanced by what was sampled."""

    def __init__(
        self, num_slots: int, max_len: int, layout: Layout, block_size: int, device: torch.device,
        shape: DraftShape = NO_DRAFTS,
    ) -> None:  # fmt: skip
        """max_len, block_size: tokens.  shape: of the drafts that lie behind them."""
        self.num_slots, self.max_len, self.device = num_slots, max_len, device
        self.block_size, self._layout = block_size, layout
        rows = num_slots + 1  # the last one is the spare slot
        self.spare = num_slots
        self.token_ids = torch.zeros(rows, max_len, dtype=torch.int32, device=device)
        self.shape = shape
        self._parents = torch.zeros(rows, shape.num_parents, dtype=torch.int8, device=device)
        self.num_computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits = torch.zeros(rows, dtype=torch.int64, device=device)
        width = -(-max_len // block_size)
        # Of each block not its pages, but its numbers in caches that are views of the pool.
        self.block_tables = tuple(
            torch.zeros(rows, width, dtype=torch.int32, device=device) for _ in layout.tables
        )
        on_gpu = device.type == "cuda" and has_triton()
        self._advance = advance_slots if on_gpu else advance_slots_ref
        self._write_drafts = write_drafts if on_gpu else write_drafts_ref
        # What the host can know exactly: while a prompt is computed nothing is sampled.
        self.num_known = np.zeros(rows, dtype=np.int64)  # tokens the admission brought
        self.num_prefilled = np.zeros(rows, dtype=np.int64)  # of those, planned so far
        self._table_lens = np.zeros(rows, dtype=np.int64)  # blocks
        self._alive = np.zeros(rows, dtype=bool)
        self.generation = 0  # another one behind every admission

    def retire(self, slots: list[int]) -> None:
        """Mark slots dead.  A plan never has a row on a dead slot."""
        if slots:
            self._alive[slots] = False

    def are_alive(self, slots: np.ndarray) -> np.ndarray:
        """Which of the slots are in use by the sequence that has last been admitted; [B] bool."""
        return self._alive[slots]

    def admit(self, admissions: list[Admission]) -> None:
        """Fill slots: token ids, lengths and the blocks that a prefix hit brought."""
        if not admissions:
            return
        self.generation += 1
        slots = np.array([a.slot for a in admissions])
        lengths = np.array([len(a.token_ids) for a in admissions])
        self.num_known[slots] = lengths
        self.num_prefilled[slots] = [a.num_computed for a in admissions]
        self._alive[slots] = True
        self._table_lens[slots] = 0
        self._write_tokens(admissions, lengths)
        limits = [a.limit for a in admissions]
        facts = upload(np.array([slots, self.num_prefilled[slots], limits]), self.device)
        self.num_computed[facts[0]] = facts[1]
        self.limits[facts[0]] = facts[2]
        pages = [np.asarray(a.pages, dtype=np.int64) for a in admissions]
        num_blocks = [len(each) // self._layout.pages_a_block for each in pages]
        self._append(np.repeat(slots, num_blocks), np.concatenate(pages))

    def grow(self, growth: Growth) -> None:
        """Append blocks to the tables of their slots."""
        if growth.slots:
            self._append(np.array(growth.slots, dtype=np.int64), np.array(growth.pages, dtype=np.int64))

    def _append(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """A block for each of these slots [n]; pages: of them all, flat."""
        if not len(slots):
            return
        lens = self._table_lens
        first = np.flatnonzero(np.diff(slots, prepend=-1))  # of each slot's blocks
        counts = np.diff(first, append=len(slots))
        owners = slots[first]
        assert len(set(owners.tolist())) == len(owners), f"blocks of a slot are not side by side: {slots}"
        entries = np.repeat(lens[owners] - first, counts) + np.arange(len(slots))
        lens[owners] += counts
        most, width = int(entries.max()), self.block_tables[0].shape[1]
        assert most < width, f"slot {slots[entries.argmax()]}: {most + 1} blocks in {width} entries"
        pages = pages.reshape(len(slots), -1)
        blocks = [pages[:, table.stripe] * table.factor for table in self._layout.tables]
        rows, entries, *blocks = upload(np.array([slots, entries, *blocks]), self.device)
        for table, numbers in zip(self.block_tables, blocks, strict=True):
            table[rows, entries] = numbers.to(table.dtype)

    def _write_tokens(self, admissions: list[Admission], lengths: np.ndarray) -> None:
        """All in one copy and one launch."""
        cells, end = np.empty((2, lengths.sum()), dtype=np.int64), 0
        for admission, length in zip(admissions, lengths.tolist(), strict=True):
            start, end, first = end, end + length, admission.slot * self.max_len
            cells[0, start:end] = np.arange(first, first + length)
            cells[1, start:end] = admission.token_ids
        places, tokens = upload(cells, self.device)
        self.token_ids.view(-1)[places] = tokens.to(self.token_ids.dtype)

    def samples(self, slots: np.ndarray, num_query: np.ndarray) -> np.ndarray:
        """Which rows reach their last known token and so yield tokens, [B] bool; counts the prompt chunks."""
        assert self._alive[slots].all(), f"a row on a dead slot: {slots[~self._alive[slots]]}"
        left = self.num_known[slots] - self.num_prefilled[slots]
        self.num_prefilled[slots] += np.minimum(num_query, left)
        return num_query >= left

    def most_keys(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that each row has at most once the step is done that has just been planned, [B].

        Exact while a prompt is computed; behind it, what there is room for.
        """
        prefilled, known = self.num_prefilled[slots], self.num_known[slots]
        return np.where(prefilled < known, prefilled, self._table_lens[slots] * self.block_size)

    def advance(self, rows: SlotRows, output: SampleOutput) -> Tensor:
        """Write what was sampled behind the last known token, and move on by what was accepted.

        Returns the place of each row's newest token: the last known one, or of a prompt the next to compute;
        [B] int64.
        """
        return self._advance(self.token_ids, self.num_computed, rows, output.tokens, output.num_new)

    def advance_chunks(self, rows: SlotRows) -> None:
        """Move on where nothing is sampled; of the other rows feedback will tell."""
        ends = rows.starts + rows.num_query
        self.num_computed[rows.slots] = torch.where(rows.samples, rows.starts, ends)

    def trees(self, slots: Tensor) -> Trees | None:
        """The trees that these slots' [B] drafts are; None: they are chains."""
        depth = self.shape.tree_depth
        return Trees(self._parents, slots, depth) if depth else None

    def write_drafts(self, rows: SlotRows, newest: Tensor, drafts: Drafts) -> None:
        """Put drafts [B, k] behind the `newest` [B] tokens of rows that sample, to be verified next."""
        tokens, parents = drafts.tokens, drafts.parents
        if tokens.shape[1]:
            self._write_drafts(self.token_ids, rows.slots, newest, rows.samples, tokens)
        if parents is not None:
            self._parents[rows.slots, : parents.shape[1]] = parents

    def tell(self, rows: SlotRows, output: SampleOutput, drafts: Drafts) -> Tensor:
        """The message to other stages about a step that was sampled here.

        It is as wide whatever the step: they know its rows, and not how it was padded.
        """
        shape, known = self.shape, self.num_computed[rows.slots] - output.num_new
        missing = (0, shape.max_new - output.tokens.shape[1])
        path = None if output.path is None else F.pad(output.path, missing)
        output = replace(output, tokens=F.pad(output.tokens, missing), path=path)
        return Feedback(
            slots=torch.where(rows.samples, rows.slots, self.spare),
            roots=torch.where(rows.samples, known, 0),
            output=output,
            drafts=F.pad(drafts.tokens, (0, shape.num_drafts - drafts.tokens.shape[1])),
            parents=self._parents[rows.slots],
        ).pack()

    def apply(self, feedback: Feedback) -> None:
        """Do as the stage did that sampled: `advance` and `write_drafts`."""
        slots, roots, num_new = feedback.slots, feedback.roots, feedback.output.num_new
        append_ref(self.token_ids, slots, roots, feedback.output.tokens, num_new)
        self.num_computed[slots] = roots + num_new
        drafts = feedback.drafts
        append_ref(self.token_ids, slots, roots + num_new, drafts, torch.full_like(roots, drafts.shape[1]))
        self._parents[slots] = feedback.parents.to(self._parents.dtype)
