"""The textbook rejection test: the exact distribution whatever the drafts, and faults that spoil it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid import LLM, SamplingParams
from pellucid.config import SpeculativeConfig
from pellucid.dist.vocab_share import vocab_share
from pellucid.sample.noise import Purpose, gumbel, token_codes
from pellucid.sample.sampler import Sampler
from pellucid.sample.state import SamplingState
from pellucid.sample.vocabulary import WHOLE_VOCABULARY, SplitVocabulary, Vocabulary
from pellucid.spec import standard
from pellucid.spec.base import Drafts, DraftShape
from pellucid.spec.draft_probs import BLOCK, DraftProbs
from pellucid.spec.registry import VERIFIERS
from pellucid.spec.standard import StandardVerifier
from pellucid.spec.verify import VerifyRows
from tests.llm.test_invariance import BASE, NGRAM, random_requests
from tests.sample.conftest import admit, chi_square_z, make
from tests.sample.test_statistics import exact
from tests.sample.test_vocabulary import Round, ThreadGroup

V, K, PROMPT, LENGTH = 6, 3, 2, 3  # tokens, drafts, the one prompt token, tokens that are looked at
STANDARD = SpeculativeConfig(method="toy", num_speculative_tokens=K, rejection_sample_method="standard")
MODEL = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 1.5  # logits given the last token
FAR = torch.softmax(torch.randn(V, V, generator=torch.Generator().manual_seed(4)) * 2, -1)  # the drafter's
WIDE = torch.randn(100, 100, generator=torch.Generator().manual_seed(5)) * 2  # a model of more tokens


def all_of(probs: Tensor) -> DraftProbs:
    """Of [N, K, V] all tokens."""
    num_blocks = -(-probs.shape[2] // BLOCK)
    blocks = torch.arange(num_blocks, dtype=torch.int32).expand(*probs.shape[:2], -1)
    return DraftProbs(blocks, F.pad(probs, (0, num_blocks * BLOCK - probs.shape[2])))


class Texts:
    """Texts that differ in their seed, drafted by `q` [V, V] and verified, all of them in one batch.

    model: [V, this rank's share of V], the logits that the sampler is given.
    """

    def __init__(
        self, sampling: SamplingParams, count: int, q: Tensor | None = FAR,
        vocabulary: Vocabulary = WHOLE_VOCABULARY, purpose: Purpose = Purpose.DRAFT,
        model: Tensor = MODEL,
    ) -> None:  # fmt: skip
        self.count, self.q, self.purpose = count, q, purpose
        self.model, self.vocab_size = model, len(model)
        self.state, self.seeds = SamplingState(count, self.vocab_size), torch.arange(1000, 1000 + count)
        self.verifier = StandardVerifier.of(STANDARD, Sampler(self.state, vocabulary), DraftShape(K))
        admit(self.state, [make(i, sampling, (PROMPT,), seed=1000 + i) for i in range(count)])
        self.token_ids = torch.full((count, 1 + LENGTH + 2 * K + 2), PROMPT, dtype=torch.int32)
        self.lengths = torch.ones(count, dtype=torch.int64)
        self.slots, self.codes = torch.arange(count), token_codes(self.vocab_size)
        self.num_accepted = 0

    def step(self) -> None:
        """Draft, verify, and write what is new."""
        at = (self.lengths - 1)[:, None] + torch.arange(1 + K)
        probs = torch.zeros(self.count, K, self.vocab_size)
        for i in range(K):
            last = self.token_ids[self.slots, at[:, i]].long()
            guess, probs[:, i] = self.guess(last, at[:, i] + 1)
            self.token_ids[self.slots, at[:, i + 1]] = guess.int()
        drafts = Drafts(self.token_ids.gather(1, at[:, 1:]), None if self.q is None else all_of(probs))
        self.verifier.keep(self.slots, drafts)
        inputs = self.token_ids.gather(1, at).flatten()
        rows = VerifyRows(
            cu_logits=torch.arange(self.count + 1) * (1 + K), inputs=inputs,
            room=torch.full((self.count,), 1 + K), samples=torch.ones(self.count, dtype=torch.bool),
            max_drafts=K,
        )  # fmt: skip
        slots = self.slots.repeat_interleave(1 + K)
        batch = self.state.batch(slots.numpy(), slots, at.flatten() + 1)
        self.output = self.verifier(self.model[inputs.long()], batch, rows, self.token_ids)
        kept = torch.arange(1 + K) < self.output.num_new[:, None]
        self.token_ids[self.slots[:, None], at + 1] = self.output.tokens.where(
            kept, self.token_ids.gather(1, at + 1)
        )
        self.lengths += self.output.num_new
        self.num_accepted += int((self.output.num_new - 1).sum())

    def guess(self, last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | float]:
        """Drafts [N], and what they were drawn from."""
        if self.q is None:
            return (last * 5 + 1) % self.vocab_size, 0.0
        noise = gumbel(self.seeds, positions, self.codes, self.purpose)
        return (self.q[last].log() + noise).argmax(-1), self.q[last]

    def run(self) -> np.ndarray:
        """[N, LENGTH]: each text's first tokens."""
        while (self.lengths < 1 + LENGTH).any():
            going = self.lengths < 1 + LENGTH
            before = self.token_ids.clone(), self.lengths.clone()
            self.step()
            self.token_ids = self.token_ids.where(going[:, None], before[0])
            self.lengths = self.lengths.where(going, before[1])
        return self.token_ids[:, 1 : 1 + LENGTH].numpy()


def joint(sampling: SamplingParams) -> np.ndarray:
    """[V ** LENGTH]: the target's exact probability of every text, token by token."""
    known: dict[tuple[int, frozenset[int]], np.ndarray] = {}

    def after(said: list[int]) -> np.ndarray:
        """[V]: what follows, by the last token and those with a penalty."""
        key = said[-1], frozenset(said[1:]) if sampling.presence_penalty else frozenset[int]()
        if key not in known:
            logits = MODEL[said[-1]].clone()
            logits[list(set(said[1:]))] -= sampling.presence_penalty
            known[key] = exact(logits, sampling)
        return known[key]

    chances = []
    for text in product(range(V), repeat=LENGTH):
        chance, said = 1.0, [PROMPT]
        for token in text:
            chance *= after(said)[token]
            said.append(token)
        chances.append(chance)
    return np.array(chances)


def deviation(texts: np.ndarray, sampling: SamplingParams) -> float:
    """How many standard deviations the texts are off the exact joint distribution."""
    cells = texts @ V ** np.arange(LENGTH - 1, -1, -1)
    observed = np.bincount(cells, minlength=V**LENGTH).astype(float)
    expected = joint(sampling) * len(texts)
    rare = expected < 4  # pooled: chi-square wants a few in every cell
    pool = lambda x: np.append(x[~rare], x[rare].sum())  # noqa: E731
    assert (observed[expected == 0] == 0).all(), "drew what has probability 0"
    return chi_square_z(pool(observed), pool(expected))


NEAR = torch.softmax(MODEL, -1)


@pytest.mark.parametrize(
    ("options", "q"),
    [
        *(({}, q) for q in (FAR, NEAR, None)),
        *(({"top_p": 0.7, "presence_penalty": 1.0}, q) for q in (FAR, None)),
        *(({"temperature": 0.5}, FAR), ({"top_k": 3}, NEAR), ({"top_k": 3}, None), ({"min_p": 0.2}, FAR)),
        *(
            pytest.param(options, q, marks=pytest.mark.matrix)
            for options, q in [
                ({"top_p": 0.7, "presence_penalty": 1.0}, NEAR),
                *(({"temperature": 0.5}, q) for q in (NEAR, None)),
                ({"top_k": 3}, FAR),
                *(({"min_p": 0.2}, q) for q in (NEAR, None)),
            ]
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_texts_have_the_targets_distribution(options: dict, q: Tensor | None) -> None:
    sampling = SamplingParams(**options)
    texts = Texts(sampling, 12_000, q)
    drawn = texts.run()
    assert abs(deviation(drawn, sampling)) < 4
    for place in range(LENGTH):  # and so has each place by itself
        marginal = joint(sampling).reshape((V,) * LENGTH).sum(tuple({0, 1, 2} - {place}))
        observed = np.bincount(drawn[:, place], minlength=V).astype(float)
        assert abs(chi_square_z(observed, marginal * len(drawn))) < 4
    assert texts.num_accepted > 2000, "nothing was accepted, so nothing was tested"


def test_more_drafts_stand_than_by_agreement() -> None:
    """With q = p every draft stands."""
    texts = Texts(SamplingParams(), 500, torch.softmax(MODEL, -1))
    texts.step()
    assert (texts.output.num_new == 1 + K).all()


def test_the_first_drafts_may_be_fewer_than_later_ones() -> None:
    """A step may want less than the most; the room for what is kept is for the most."""
    texts = Texts(SamplingParams(), 500, torch.softmax(MODEL, -1))
    texts.verifier.keep(
        texts.slots, Drafts(torch.zeros(500, 1, dtype=torch.int32), all_of(torch.ones(500, 1, V) / V))
    )
    texts.step()
    assert (texts.output.num_new == 1 + K).all()


def test_logits_are_looked_at_in_parts_and_it_does_not_matter_in_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of [logits, vocabulary] half a dozen at a time would be gigabytes."""
    sizes, pick = list[int](), standard.pick

    def picking(trial: standard.Trial, codes: Tensor) -> Tensor:
        sizes.append(trial.q.numel())
        return pick(trial, codes)

    monkeypatch.setattr(standard, "pick", picking)
    whole = Texts(SamplingParams(), 50).run()
    most = max(sizes)
    monkeypatch.setattr(standard, "_SLICE_ELEMENTS", 7 * V + 1)
    sizes.clear()
    assert (Texts(SamplingParams(), 50).run() == whole).all()
    assert max(sizes) == 7 * V < most


def test_without_the_subtraction_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "residual", lambda p, q: p)
    assert deviation(Texts(SamplingParams(), 12_000).run(), SamplingParams()) > 8


def test_reused_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are drawn with the noise of what replaces them; one chance for all places."""
    drawn = Texts(SamplingParams(), 12_000, purpose=Purpose.RESIDUAL).run()
    assert deviation(drawn, SamplingParams()) > 8
    once = standard.uniform
    monkeypatch.setattr(standard, "uniform", lambda seeds, places, purpose: once(seeds, places * 0, purpose))
    assert deviation(Texts(SamplingParams(), 12_000).run(), SamplingParams()) > 8


def test_greedy_texts_are_the_argmax_whatever_the_drafts() -> None:
    """In the company of random ones, too."""
    texts = Texts(SamplingParams(temperature=0), 100)
    admit(texts.state, [make(i, SamplingParams(), (PROMPT,), seed=i) for i in range(50)])
    texts.run()
    for row in texts.token_ids[50:].tolist():
        assert row[1 : 1 + LENGTH] == MODEL.argmax(-1)[row[:LENGTH]].tolist()
    assert len({tuple(row[:4]) for row in texts.token_ids[:50].tolist()}) > 10


def test_logprobs_are_of_the_tokens_that_were_kept() -> None:
    texts = Texts(SamplingParams(logprobs=0), 200)
    texts.step()
    output = texts.output
    assert output.logprobs is not None
    kept = torch.arange(1 + K) < output.num_new[:, None]
    assert torch.equal(output.logprobs.token_ids[..., 0][kept], output.tokens[kept])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}], ids=str)
def test_ranks_that_share_the_vocabulary_agree(options: dict) -> None:
    q, table = torch.softmax(WIDE / 2, -1), Round(2)
    share = vocab_share(len(WIDE), 2)
    shares = F.pad(WIDE, (0, 2 * share - len(WIDE))).split(share, dim=1)

    def rank(index: int) -> np.ndarray:
        vocabulary = SplitVocabulary(ThreadGroup(index, 2, table), len(WIDE))
        return Texts(SamplingParams(**options), 300, q, vocabulary, model=shares[index]).run()

    expected = Texts(SamplingParams(**options), 300, q, model=WIDE).run()
    assert expected.min() < share <= expected.max()
    with ThreadPoolExecutor(2) as pool:
        assert all((drawn == expected).all() for drawn in pool.map(rank, range(2)))


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_trees_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=f"'{method}' judges chains"):
        VERIFIERS.load(method).of(STANDARD, Sampler(SamplingState(1, V)), DraftShape(2, tree_depth=1))


# Through the engine


STANDARD_DRAFTS = {"rejection_sample_method": "standard", "num_speculative_tokens": 3, "adaptive": False}
OPTIONS = BASE | {"depth": 2, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def certain(tiny: Path) -> Iterator[LLM]:
    """An engine whose drafts are certain."""
    with LLM(str(tiny), **OPTIONS, speculative_config=NGRAM | STANDARD_DRAFTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drawn(tiny: Path, tiny_draft: Path) -> Iterator[LLM]:
    """One whose drafts are drawn."""
    with LLM(str(tiny), **OPTIONS, speculative_config=STANDARD_DRAFTS | {"model": str(tiny_draft)}) as llm:
        yield llm


def test_greedy_requests_keep_their_tokens(tiny: Path, certain: LLM, drawn: LLM) -> None:
    prompts, params = random_requests(30, seed=8)
    greedy = [sampling.clone(temperature=0) for sampling in params]
    with LLM(str(tiny), **BASE) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    for engine in (certain, drawn):
        assert [o.outputs[0].token_ids for o in engine.generate(prompts, greedy, use_tqdm=False)] == expected


def test_sampled_requests_keep_their_distribution_beside_certain_drafts(certain: LLM) -> None:
    """Three tokens of three that are allowed, so that look-ups hit: against the model's own numbers."""
    allowed, prompt = [60, 61, 62], [60, 61, 62, 61, 60, 62, 62, 60]
    texts = list(product(allowed, repeat=3))
    scored = certain.generate(
        [[*prompt, *text] for text in texts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0),
        use_tqdm=False,
    )
    raw = {
        text: [entry[token].logprob for entry, token in zip(last, text, strict=True) if entry]
        for text, last in zip(texts, [(o.prompt_logprobs or [])[-3:] for o in scored], strict=True)
    }
    chances = []
    for text in texts:
        rivals = [[raw[(*text[:i], a, *text[i + 1 :])][i] for a in allowed] for i in range(3)]
        own = [raw[text][i] for i in range(3)]
        chances.append(np.prod([np.exp(o) / np.exp(r).sum() for o, r in zip(own, rivals, strict=True)]))
    assert sum(chances) == pytest.approx(1)
    before = certain.llm_engine.stats.num_accepted_tokens
    params = [
        SamplingParams(allowed_token_ids=allowed, max_tokens=3, ignore_eos=True, seed=i) for i in range(1500)
    ]
    said = [tuple(o.outputs[0].token_ids) for o in certain.generate([prompt] * 1500, params, use_tqdm=False)]
    observed = np.array([said.count(text) for text in texts], float)
    assert certain.llm_engine.stats.num_accepted_tokens - before > 300
    assert abs(chi_square_z(observed, np.array(chances) * 1500)) < 4


def test_sampled_requests_keep_their_distribution_beside_drawn_drafts(tiny: Path, drawn: LLM) -> None:
    """The first two tokens, the second of which was drafted, against transformers' numbers."""
    from transformers import AutoModelForCausalLM

    prompt, temperature, count = [9, 8, 7, 6, 5], 0.5, 3000
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1]
        second = model(torch.tensor([[*prompt, token] for token in range(len(first))])).logits[:, -1]
    chances = (first / temperature).softmax(-1)[:, None] * (second / temperature).softmax(-1)
    before = drawn.llm_engine.stats.num_accepted_tokens
    params = [
        SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, seed=i) for i in range(count)
    ]
    outputs = drawn.generate([prompt] * count, params, use_tqdm=False)
    assert drawn.llm_engine.stats.num_accepted_tokens - before > 500
    observed = np.zeros(chances.shape)
    for output in outputs:
        observed[tuple(output.outputs[0].token_ids[:2])] += 1
    expected = chances.double().numpy() * count
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    assert abs(chi_square_z(observed, np.append(expected[common], expected[~common].sum()))) < 4
    assert common.sum() > 12
