"""The kernels behind the draw against their plain references: which drafts stand, and what the slots get."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.sampling.verify_chain import (
    NODES,
    Chance,
    take_by_chance,
    take_by_chance_ref,
    verify_chain,
    verify_chain_ref,
)
from pellucid.kernels.slots import advance_slots as slots_kernels
from pellucid.rows import SlotRows
from pellucid.sample.noise import Purpose, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS, LENGTH = 20, 64


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("max_new", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_the_same_drafts_stand(max_new: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(max_new)
    seen: set[int] = set()
    for _ in range(10):
        # Tokens of two kinds, so that drafts often stand; rows without logits, and without room.
        counts = integers(generator, max_new + 1, num_rows)
        cu_logits = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
        chosen, inputs = (integers(generator, 2, int(counts.sum())).int() for _ in range(2))
        room = integers(generator, max_new + 2, num_rows) - 1
        samples = integers(generator, 5, num_rows) > 0
        args = (chosen, inputs, cu_logits, room, samples)
        flat, expected = verify_chain(*args, max_new=max_new), verify_chain_ref(*args, max_new=max_new)
        assert flat.dtype == expected.dtype == torch.int32 and flat.shape == expected.shape
        (tokens, num_new), (tokens_ref, num_new_ref) = (
            part.split([num_rows * max_new, num_rows]) for part in (flat, expected)
        )
        assert torch.equal(num_new, num_new_ref)
        counted = torch.arange(max_new, device=DEVICE) < num_new[:, None]
        assert torch.equal(tokens.view(-1, max_new)[counted], tokens_ref.view(-1, max_new)[counted])
        seen |= set(num_new.tolist())
    assert num_rows == 1 or len(seen) >= min(3, max_new)


def chance_of(num_logits: int, num_rates: int, generator: torch.Generator) -> Chance:
    """Any rates, and any noise."""
    table = torch.randint(-(2**62), 2**62, (NUM_SLOTS, 5), generator=generator)
    return Chance(
        rates=torch.rand(num_rates, generator=generator).to(DEVICE),
        seeds=table.to(DEVICE)[:, 2],
        slots=integers(generator, NUM_SLOTS, num_logits),
        positions=integers(generator, 10**6, num_logits),
        purpose=int(Purpose.ACCEPT),
    )


def naive_chance(
    counts: list[int], chosen: list[int], inputs: list[int], rates: list[float], numbers: list[float]
) -> list[list[int]]:
    """The tokens of every row, by the rule itself; numbers: one for each logit, that decides on its draft."""
    rows, first = [], 0
    for count in counts:
        tokens = []
        for node in range(count):
            here = first + node
            if node + 1 == count or numbers[here] >= rates[min(node, len(rates) - 1)]:
                tokens.append(chosen[here])
                break
            tokens.append(inputs[here + 1])
        rows.append(tokens)
        first += count
    return rows


@pytest.mark.parametrize("max_new", range(2, 10))
@pytest.mark.parametrize("num_rows", [1, 13])
def test_by_chance_the_same_drafts_stand(max_new: int, num_rows: int) -> None:
    """Whether or not they are what was chosen; of a row of padding, with more logits than any, too."""
    generator = torch.Generator().manual_seed(max_new)
    seen: set[int] = set()
    for padding in (0, 0, 0, 2 * NODES + 5):
        counts = integers(generator, max_new + 1, num_rows)
        counts[-1] = padding or max_new
        num_logits = int(counts.sum())
        cu_logits = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
        chosen, inputs = (integers(generator, 3, num_logits).int() for _ in range(2))
        chance = chance_of(num_logits, max_new, generator)
        args = (chosen, inputs, cu_logits, chance)
        (taken, fed), (taken_ref, fed_ref) = take_by_chance(*args), take_by_chance_ref(*args)
        is_draft = torch.ones(num_logits, dtype=torch.bool, device=DEVICE)
        is_draft[cu_logits[:-1][counts > 0]] = False
        assert taken.dtype == fed.dtype == torch.int32
        assert torch.equal(taken, taken_ref) and torch.equal(fed[is_draft], fed_ref[is_draft])
        if padding:
            continue
        room, samples = torch.full_like(counts, max_new), counts >= 0
        flat = verify_chain(taken, fed, cu_logits, room, samples, max_new=max_new)
        tokens, num_new = flat.split([num_rows * max_new, num_rows])
        kept = [row[:n] for row, n in zip(tokens.view(-1, max_new).tolist(), num_new.tolist(), strict=True)]
        numbers = uniform(chance.seeds[chance.slots], chance.positions, Purpose.ACCEPT).tolist()
        lists = (counts.tolist(), chosen.tolist(), inputs.tolist(), chance.rates.tolist(), numbers)
        assert kept == naive_chance(*lists)
        seen |= set(num_new.tolist())
    assert num_rows == 1 or len(seen) >= 3


@pytest.mark.parametrize("take", [take_by_chance, take_by_chance_ref])
def test_chance_is_the_samplers_uniform_number_to_the_last_bit(take) -> None:  # noqa: ANN001
    num_logits = 3000
    chance = chance_of(num_logits, num_logits, torch.Generator().manual_seed(1))
    numbers = uniform(chance.seeds[chance.slots], chance.positions, Purpose.ACCEPT)
    cu_logits = torch.tensor([0, num_logits], device=DEVICE)
    chosen, inputs = (torch.full((num_logits,), i, dtype=torch.int32, device=DEVICE) for i in (1, 2))
    for rates, expected in ((numbers, 1), (numbers.nextafter(torch.ones_like(numbers)), 2)):
        taken, _ = take(chosen, inputs, cu_logits, dataclasses.replace(chance, rates=rates))
        assert (taken[:-1] == expected).all() and taken[-1] == 1, "behind the last node there is no draft"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_chance_is_the_same_in_a_recording() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = integers(generator, 6, 100)
    cu_logits = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
    num_logits = int(counts.sum())
    chosen, inputs = (integers(generator, 3, num_logits).int() for _ in range(2))
    args = (chosen, inputs, cu_logits, chance_of(num_logits, 5, generator))
    room, samples = torch.full_like(counts, 4), counts >= 0

    def yields(take, walk) -> Tensor:  # noqa: ANN001
        return walk(*take(*args), cu_logits, room, samples, max_new=5)[-100:]

    yields(take_by_chance, verify_chain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        num_new = yields(take_by_chance, verify_chain)
    for _ in range(3):
        graph.replay()
        assert torch.equal(num_new, yields(take_by_chance_ref, verify_chain_ref))
        args[3].positions.add_(1)


def step_of(num_rows: int, max_new: int) -> tuple[SlotRows, Tensor, Tensor]:
    """Rows, tokens and how many of them count: prompt chunks, and rows with up to max_new - 1 drafts."""
    generator = torch.Generator().manual_seed(num_rows)
    num_drafts = integers(generator, max_new, num_rows)
    starts, samples = integers(generator, 30, num_rows), integers(generator, 4, num_rows) > 0
    query_lens = 1 + num_drafts + (~samples) * integers(generator, 9, num_rows)
    num_new = torch.minimum(integers(generator, max_new + 1, num_rows), 1 + num_drafts) * samples
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)  # what no kernel here reads
    unread = (
        "seq_lens",
        "cu_seqlens_q",
        "input_ids",
        "places",
        "logit_slots",
        "logit_places",
        "logit_inputs",
    )
    rows = SlotRows(
        slots=torch.randperm(NUM_SLOTS - 1, generator=generator)[:num_rows].to(DEVICE),
        starts=starts,
        num_query=query_lens,
        roots=starts + query_lens - 1 - num_drafts,
        room=torch.full_like(starts, 99),
        samples=samples,
        block_tables=(),
        slot_mappings=(),
        **dict.fromkeys(unread, empty),
    )
    return rows, 100 + integers(generator, 100, num_rows, max_new).int(), num_new.int()


@pytest.mark.parametrize("max_new", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_slots_get_the_same(max_new: int, num_rows: int, transposed: bool) -> None:
    rows, tokens, num_new = step_of(num_rows, max_new)
    drafts = tokens.flip(0).T.contiguous().T if transposed else tokens + 100
    states = [
        (
            torch.zeros((NUM_SLOTS, LENGTH), dtype=torch.int32, device=DEVICE),
            torch.arange(NUM_SLOTS, device=DEVICE) + 40,
        )
        for _ in range(2)
    ]
    newest = [
        advance(*state, rows, tokens, num_new)
        for advance, state in zip(
            (slots_kernels.advance_slots, slots_kernels.advance_slots_ref), states, strict=True
        )
    ]
    assert torch.equal(*newest)
    for write, state, places in zip(
        (slots_kernels.write_drafts, slots_kernels.write_drafts_ref), states, newest, strict=True
    ):
        write(state[0], rows.slots, places, rows.samples, drafts)
    spare = NUM_SLOTS - 1  # takes anything
    assert torch.equal(states[0][0][:spare], states[1][0][:spare])
    assert torch.equal(states[0][1], states[1][1])
    assert (states[0][0][:spare] > 0).any() == rows.samples.any()
