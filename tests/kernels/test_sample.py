"""The fused draw: the reference's and the torch path's tokens, however rows and vocabulary are cut up."""

from __future__ import annotations

from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pellucid.kernels.sampling import sample
from pellucid.kernels.sampling.sample import BLOCK_TOKENS, draw, draw_ref
from pellucid.sample.draw import Draw, FusedDraw, TorchDraw
from pellucid.sample.noise import Purpose, gumbel, token_codes
from pellucid.sample.state import Column, LogitsBatch, SamplingState
from pellucid.sample.vocabulary import WHOLE_VOCABULARY, Vocabulary
from pellucid.sampling_params import SamplingParams
from tests.diagonal import diagonal
from tests.sample.conftest import admit, make
from tests.sample.test_vocabulary import on_every_rank

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 12


def requests(vocab_size: int) -> SamplingState:
    """A slot each of several temperatures, the first two greedy."""
    state = SamplingState(NUM_SLOTS, vocab_size, DEVICE)
    heat = [0.0, 0.0, 1.0, 0.3, 2.0, 0.6, 1.0, 1e30, 0.9, 1.0, 0.7, 1.0]
    admit(
        state,
        [
            make(slot, SamplingParams(temperature=t), seed=-(7**slot) * (slot % 2 or -1))
            for slot, t in enumerate(heat)
        ],
    )
    return state


def batch_of(state: SamplingState, slots: list[int]) -> LogitsBatch:
    on_device = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    return state.batch(np.array(slots, np.int64), on_device, torch.arange(len(slots), device=DEVICE) * 5 + 1)


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return (2 * torch.randn(num_rows, vocab_size, generator=generator)).to(DEVICE, dtype)


def columns(state: SamplingState) -> tuple[Tensor, Tensor, Tensor]:
    temperature = state.table.view(torch.float64)[:, Column.TEMPERATURE]
    return state.block_codes, state.table[:, Column.SEED], temperature


@pytest.mark.parametrize("num_rows,vocab_size", [(1, 1), (1, 5003), (2, 700), (3, 5000), (12, 1501)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_draws_what_its_reference_draws(
    num_rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    state = requests(vocab_size)
    batch = batch_of(state, list(range(NUM_SLOTS))[-num_rows:])
    arguments = (*columns(state), batch.slots, batch.positions)
    logits = logits_of(num_rows, vocab_size, dtype)
    values, tokens = draw(logits, *arguments)
    expected_values, expected = draw_ref(logits, *arguments)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=3e-5)


def test_the_reference_makes_the_noise_of_the_sampler() -> None:
    seeds, positions = torch.tensor([3, -8, 2**62]), torch.tensor([0, 7, 10**6])
    codes, slots = token_codes(3000), torch.arange(3)
    block_codes = codes[::BLOCK_TOKENS].contiguous()
    heat = torch.ones(3, dtype=torch.float64)
    values, tokens = draw_ref(torch.zeros(3, 3000), block_codes, seeds, heat, slots, positions)
    sizes = torch.tensor([BLOCK_TOKENS] * (3000 // BLOCK_TOKENS) + [3000 % BLOCK_TOKENS])
    best = (gumbel(seeds, positions, block_codes, Purpose.BLOCK) + sizes.log()).max(-1)
    torch.testing.assert_close(values, best.values, rtol=2e-6, atol=2e-6)
    is_in_block = torch.arange(3000) // BLOCK_TOKENS == best.indices[:, None]
    noise = gumbel(seeds, positions, codes).where(is_in_block, -float("inf"))
    assert torch.equal(tokens.long(), noise.argmax(-1))


def test_every_number_of_the_noise_is_the_samplers() -> None:
    """One token at a time, so that each block's score is seen, not only the winner's."""
    seeds, positions = torch.tensor([5, -3], device=DEVICE), torch.tensor([9, 1000], device=DEVICE)
    codes, places = token_codes(90 * 7, DEVICE)[::BLOCK_TOKENS].contiguous(), torch.arange(90) * 7
    noise = gumbel(seeds, positions, codes, Purpose.BLOCK)
    # In a row of its own, each token is alone at 0 and the others are out of the question.
    logits = torch.full((90, 90 * 7), -float("inf"), device=DEVICE)
    logits[torch.arange(90), places] = 0.0
    for row in (0, 1):
        values, tokens = draw(
            logits,
            codes,
            seeds,
            torch.ones(2, dtype=torch.float64, device=DEVICE),
            torch.full((90,), row, device=DEVICE),
            positions[row].expand(90).contiguous(),
        )
        assert torch.equal(tokens.cpu().long(), places)
        torch.testing.assert_close(values, noise[row][places // BLOCK_TOKENS], rtol=1e-5, atol=1e-5)


@diagonal({"spread": [0.1, 2.0, 30.0], "few": [0, 100]})
def test_the_draw_is_the_same_however_the_blocks_are_shared_out(
    spread: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = requests(9001)
    monkeypatch.setattr(sample, "FEW_ROWS", few)
    arguments = columns(state)
    for places in (0, 1000):
        batch = batch_of(state, [0, *range(NUM_SLOTS)])
        batch.positions.add_(places)
        logits = spread * logits_of(len(batch.slots), 9001)
        values, tokens = draw(logits, *arguments, batch.slots, batch.positions)
        expected_values, expected = draw_ref(logits, *arguments, batch.slots, batch.positions)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=3e-5)


def test_no_way_of_adding_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    state, slots = requests(9001), [2, 5, 8]
    batch, logits = batch_of(state, slots), logits_of(3, 9001, torch.bfloat16)
    arguments = (*columns(state), batch.slots, batch.positions)
    values, _ = draw(logits, *arguments)
    assert torch.equal(draw(logits.float(), *arguments)[0], values)
    monkeypatch.setattr(sample, "FEW_ROWS", 0)
    assert torch.equal(draw(logits, *arguments)[0], values)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("level", [-3e38, -1e5, 0.0, 1e5, 3e38])
def test_the_likeliest_block_wins_at_any_level_and_temperature(level: float, temperature: float) -> None:
    """Also where a logit is beyond float32 once it is divided, and beside blocks that are impossible."""
    state = SamplingState(1, 1000, DEVICE)
    admit(state, [make(0, SamplingParams(temperature=temperature))])
    batch = batch_of(state, [0, 0, 0])
    logits = torch.full((3, 1000), -float("inf"), device=DEVICE)
    logits[0, 300:320] = level
    logits[1, [700, 701, 999]] = torch.tensor([level, level + abs(level) / 8, -3.2e38], device=DEVICE)
    logits[2, [130, 512, 513]] = torch.tensor([level, float("inf"), float("inf")], device=DEVICE)
    arguments = (*columns(state), batch.slots, batch.positions)
    values, tokens = draw(logits, *arguments)
    assert torch.equal(tokens, draw_ref(logits, *arguments)[1])
    assert torch.equal(tokens, TorchDraw(state)(logits, batch, WHOLE_VOCABULARY))
    assert not values.isnan().any() and 300 <= tokens[0] < 320 and tokens[2] == 512
    if temperature <= 1 and abs(level) >= 1e5:
        assert tokens[1] == 701


@pytest.mark.parametrize("slots", [[0], [1, 0], [0, 1, 4, 6, 8, 2, 5, 3, 9]])
def test_the_fused_draw_gives_the_tokens_of_torchs(slots: list[int]) -> None:
    state = requests(3001)
    batch, logits = batch_of(state, slots), logits_of(len(slots), 3001)
    fused = FusedDraw(state)(logits, batch, WHOLE_VOCABULARY)
    assert fused.dtype == torch.int32
    assert torch.equal(fused, TorchDraw(state)(logits, batch, WHOLE_VOCABULARY))


def test_a_row_draws_the_same_in_any_company() -> None:
    state, slots = requests(3001), [3, 0, 7, 4, 10, 2, 5, 8, 9]
    batch, logits = batch_of(state, slots), logits_of(9, 3001, torch.bfloat16)
    draw_all = FusedDraw(state)
    together = draw_all(logits, batch, WHOLE_VOCABULARY)
    for row in range(9):
        alone = LogitsBatch(
            slots=batch.slots[row : row + 1],
            positions=batch.positions[row : row + 1],
            traits=batch.traits,
        )
        assert draw_all(logits[row : row + 1], alone, WHOLE_VOCABULARY) == together[row]
        assert draw_all(logits[row : row + 1].float(), alone, WHOLE_VOCABULARY) == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [FusedDraw, TorchDraw])
def test_ties_go_to_the_lowest_token_and_impossible_ones_are_never_drawn(
    kind: type[FusedDraw | TorchDraw], temperature: float
) -> None:
    state = SamplingState(1, 3000, DEVICE)
    admit(state, [make(0, SamplingParams(temperature=temperature))])
    logits = torch.full((3, 3000), -float("inf"), device=DEVICE)
    logits[0, [2900, 1700, 1711]] = 1e4
    logits[1, 2999] = -1e4
    first, second, third = kind(state)(logits, batch_of(state, [0, 0, 0]), WHOLE_VOCABULARY).tolist()
    assert first == 1700 if temperature == 0 else first in (1700, 1711, 2900)
    assert second == 2999
    assert third == 0  # nothing is possible: an id, all the same


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [FusedDraw, TorchDraw])
def test_logits_that_are_no_numbers_give_a_token_that_there_is(
    kind: type[FusedDraw | TorchDraw], temperature: float
) -> None:
    state = SamplingState(1, 128, DEVICE)
    admit(state, [make(0, SamplingParams(temperature=temperature))])
    logits = torch.full((9, 128), float("nan"), device=DEVICE)
    logits[1, -1] = 0.0
    tokens = kind(state)(logits, batch_of(state, [0] * 9), WHOLE_VOCABULARY)
    assert (tokens >= 0).all() and (tokens < 128).all()


def test_no_rows_draw_nothing() -> None:
    state = requests(50)
    assert FusedDraw(state)(logits_of(0, 50), batch_of(state, []), WHOLE_VOCABULARY).shape == (0,)


@pytest.mark.skipif(DEVICE != "cpu", reason="the stage of threads is on the CPU")
@pytest.mark.parametrize("vocab_size,size", [(331, 2), (331, 4), (1000, 3), (5, 4)])
def test_ranks_that_share_the_vocabulary_draw_the_token_of_one(
    vocab_size: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, slots = requests(vocab_size), [0, 3, 2, 6]
    batch, logits = batch_of(state, slots), logits_of(4, vocab_size)
    fused = FusedDraw(state)
    expected = fused(logits, batch, WHOLE_VOCABULARY)
    turn = Lock()

    def draw_in_turn(*arguments: Tensor, first: int) -> tuple[Tensor, Tensor]:
        with turn:  # Triton's interpreter runs in one thread at a time
            return draw(*arguments, first=first)

    monkeypatch.setattr("pellucid.sample.draw.draw", draw_in_turn)

    for draw_share in (fused, TorchDraw(state)):

        def ask(vocabulary: Vocabulary, part: Tensor, draw_share: Draw = draw_share) -> Tensor:
            return draw_share(vocabulary.trim(part), batch, vocabulary)

        for tokens in on_every_rank(logits, size, ask):
            assert torch.equal(tokens, expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 7, 256])
def test_a_large_vocabulary_is_drawn_in_a_graph(num_rows: int) -> None:
    state = requests(151_936)
    batch = batch_of(state, [(3 * i) % NUM_SLOTS for i in range(num_rows)])
    logits, fused, plain = logits_of(num_rows, 151_936, torch.bfloat16), FusedDraw(state), TorchDraw(state)
    fused(logits, batch, WHOLE_VOCABULARY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = fused(logits, batch, WHOLE_VOCABULARY)
    for _ in range(2):
        graph.replay()
        same = tokens == plain(logits, batch, WHOLE_VOCABULARY)
        assert same.float().mean() > 0.99  # but for scores within 1e-5 of each other
        batch.positions.add_(1)
        logits.copy_(logits.roll(1, 1))
