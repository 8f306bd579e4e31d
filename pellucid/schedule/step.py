"""A plan in the making, and the limits that it keeps.  Becomes a StepPlan when nothing more is added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pellucid.kv.manager import NewBlocks
from pellucid.schedule.plan import Admission, Growth, Row, StepPlan
from pellucid.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The limits of a step and of a request."""

    max_model_len: int  # tokens of a request, answer included
    num_slots: int  # sequences on the device at once
    max_num_batched_tokens: int  # of a step, drafts included
    pp: int = 1  # pipeline stages: what plan t samples is there for plan t + pp
    num_spec: int = 0  # most drafts a row may carry
    policy: str = "fcfs"  # or "priority": lower first
    watermark: float = 0.01  # share of the blocks that an admission leaves free while others run
    min_chorus: int = 8  # plans that a chorus must last, or else it is not worth forming
    most_unread: int = 256  # landings in which each of a chorus reads its tokens once
    # Running sequences -> drafts wanted, at most num_spec; None always wants num_spec.
    choose_num_propose: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 2:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least 2: "
                "each step keeps room for an answer's token and for a prompt's"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy is {self.policy!r}, must be 'fcfs' or 'priority'")

    def num_propose(self, num_running: int) -> int:
        """Drafts wanted from a step."""
        return self.num_spec if self.choose_num_propose is None else self.choose_num_propose(num_running)


class Step:
    """What has been planned so far.  Decodes are added before chunks."""

    def __init__(self, id: int, max_tokens: int, num_propose: int) -> None:
        self.id, self.max_tokens, self.num_propose = id, max_tokens, num_propose
        self.rows: list[Row] = []
        self.seqs: list[Sequence] = []  # whose rows they are
        self.num_more = 0  # tokens of the rows, beside the one that each has at least
        self.num_chunks = 0  # rows at the end that are chunks
        self.admitted: list[Admission] = []
        self.grown: list[Growth] = []
        self.has_grammar = self.has_preempted = False

    @property
    def budget(self) -> int:
        """Tokens left."""
        return self.max_tokens - self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens planned, drafts included."""
        return len(self.rows) + self.num_more

    @property
    def chunks(self) -> Iterator[tuple[Sequence, Row]]:
        """Whose chunks there are."""
        first = len(self.rows) - self.num_chunks
        return zip(self.seqs[first:], self.rows[first:], strict=True)

    def add(self, seq: Sequence, row: Row) -> None:
        self.rows.append(row)
        self.seqs.append(seq)
        self.num_more += row.num_query - 1

    def add_chunk(self, seq: Sequence, row: Row) -> None:
        self.add(seq, row)
        self.num_chunks += 1

    def grow(self, seqs: list[Sequence], grown: list[NewBlocks]) -> None:
        """Note the blocks that these sequences' tables got."""
        for group, owners, blocks in grown:
            self.grown.append(Growth(group, [seqs[owner].slot for owner in owners], blocks))

    def take_back_decode(self, seq_id: int) -> Row | None:
        """Remove a sequence's decode row and the blocks that it got for it, if it has one."""
        index = next((i for i, row in enumerate(self.rows) if row.seq_id == seq_id), None)
        if index is None:
            return None
        assert index < len(self.rows) - self.num_chunks, "a chunk stays: its blocks are published"
        row = self.rows.pop(index)
        del self.seqs[index]
        self.num_more -= row.num_query - 1
        self.grown = [growth.without(row.slot) for growth in self.grown]
        return row

    def has_chunk(self, seq_id: int) -> bool:
        return any(row.seq_id == seq_id for _, row in self.chunks)

    def to_plan(self, committed: int, retired: list[int], kv_meta: list[object]) -> StepPlan:
        return StepPlan(
            id=self.id,
            committed=committed,
            num_propose=self.num_propose,
            rows=self.rows,
            num_tokens=self.num_tokens,
            admitted=self.admitted,
            grown=self.grown,
            retired=retired,
            kv_meta=kv_meta,
            has_grammar=self.has_grammar,
        )
