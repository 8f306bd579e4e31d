"""A smaller model drafts: no output changes, its KV has no holes, and a model always agrees with itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid import LLM, LLMEngine, SamplingParams
from pellucid.config import EngineConfig
from pellucid.engine.core import Engine
from pellucid.executor.local import LocalExecutor
from pellucid.kv.kinds import Full
from pellucid.schedule.news import News
from pellucid.schedule.plan import StepPlan, StepResult
from pellucid.schedule.scheduler import Scheduler
from pellucid.worker.worker import Worker
from tests.llm.test_invariance import BASE, random_requests
from tests.models.harness import Harness, load
from tests.spec.test_ngram import digest, plainly, random_prompts, random_wishes
from tests.spec.toy import want_at_random
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

NUM_DRAFTS = 4
FULLY = pytest.mark.matrix


def drafting(model: Path, num_drafts: int = NUM_DRAFTS) -> dict[str, Any]:
    """In every step, so that the drafter's KV stays whole."""
    config = {"model": str(model), "num_speculative_tokens": num_drafts, "adaptive": False}
    return {"speculative_config": config}


def engine_of(front: Any) -> Engine:
    engine = front.llm_engine.engine if isinstance(front, LLM) else front.engine
    assert isinstance(engine, Engine)
    return engine


def worker_of(engine: Any) -> Worker:
    executor = engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.worker


@pytest.mark.parametrize("options", [{}, {"depth": 2, "max_num_batched_tokens": 100}], ids=str)
def test_nothing_of_an_output_changes(tiny: Path, tiny_draft: Path, options: dict) -> None:
    prompts, params = random_prompts(60, 50), random_wishes(60)
    with LLM(str(tiny), **BASE, **options, **drafting(tiny_draft)) as llm:
        assert digest(llm.generate(prompts, params, use_tqdm=False)) == plainly(tiny, 60)
        stats = llm.llm_engine.stats
    assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens - 100, "one case is hardly tested"


@pytest.mark.parametrize(("size", "draft_size"), [(320, 340), (340, 320)])
def test_a_vocabulary_may_be_padded_otherwise(tmp_path: Path, size: int, draft_size: int) -> None:
    """Of random weights the larger target draws tokens, too, that the draft model lacks."""
    target = str(write_checkpoint(tmp_path / "target", vocab_size=size))
    folder = write_checkpoint(tmp_path / "draft", num_hidden_layers=1, vocab_size=draft_size)
    prompts, params = random_prompts(20, 50), random_wishes(20)
    with LLM(target, **BASE) as llm:
        expected = digest(llm.generate(prompts, params, use_tqdm=False))
    with LLM(target, **BASE, **drafting(folder)) as llm:
        assert digest(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert llm.llm_engine.stats.num_draft_tokens > 100


def test_the_same_tokens_padded_otherwise_are_drafted_alike(tiny: Path, tmp_path: Path) -> None:
    """Row by row the same weights, so all that it drafts stands."""
    folder = write_checkpoint(tmp_path / "draft", vocab_size=340)
    weights, own = load_file(folder / "model.safetensors"), load_file(tiny / "model.safetensors")
    padded = {name: weights[name].clone() for name in weights}
    for name, tensor in own.items():
        padded[name] = tensor if tensor.shape == weights[name].shape else padded[name]
        padded[name][: len(tensor)] = tensor
    save_file(padded, folder / "model.safetensors")
    greedy = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    with LLM(str(tiny), **BASE, **drafting(folder)) as llm:
        llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
        stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_of_several_ranks_sizes_are_one(tiny: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "draft", vocab_size=340)
    with pytest.raises(ValueError, match="340 tokens, .* 320: they cannot share logits over tensor_paral"):
        LLM(str(tiny), **BASE, **drafting(folder), tensor_parallel_size=2)


# A model agrees with itself


def rejections(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Drafts that did not stand though their sequence went on, in words, and those that stood, in numbers."""
    rejected, accepted, commit = list[str](), list[int](), scheduler.commit

    def watch(plan: StepPlan, result: StepResult) -> News:
        flight = scheduler.rows_in_flight()
        news = commit(plan, result)
        is_running = scheduler.table.epoch[plan.rows.slots] == flight.epochs
        for row, tokens, runs in zip(plan.rows, result.tokens, is_running, strict=True):
            if runs and row.num_draft:
                accepted.append(len(tokens) - 1)
                if accepted[-1] < row.num_draft:
                    rejected.append(f"plan {plan.id}, {row}: {tokens}")
        return news

    monkeypatch.setattr(scheduler, "commit", watch)
    return rejected, accepted


SELF_COMPANIES = {
    "all at once": {},
    "two plans in flight, small chunks": {"depth": 2, "max_num_batched_tokens": 64},
    "a pool that runs dry": {"num_gpu_blocks_override": 18, "depth": 2},
    "no prefix cache, few slots": {"enable_prefix_caching": False, "max_num_seqs": 3, "depth": 3},
}


ALWAYS = {"all at once", "no prefix cache, few slots"}  # 4 drafts, in every run, the others up to 4


@pytest.mark.parametrize(
    ("company", "vary", "num"),
    [
        pytest.param(company, vary, num, marks=() if (num, vary) == (12, company not in ALWAYS) else FULLY)
        for company in SELF_COMPANIES
        for vary in (False, True)
        for num in (12, 20)
    ],
)
def test_a_model_accepts_all_that_it_drafts_itself(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, company: str, vary: bool, num: int
) -> None:
    """Greedy and sampled, with every filter, penalty and bias: any hole in its KV would show."""
    options = SELF_COMPANIES[company]
    prompts, params = random_requests(2 * num, seed=6)
    prompts, params = prompts + random_prompts(num, 50), params + random_wishes(num)
    with LLM(str(tiny), **(BASE | options), **drafting(tiny)) as llm:
        scheduler = engine_of(llm).scheduler
        if vary:
            want_at_random(scheduler, random.Random(7), NUM_DRAFTS)
        rejected, accepted = rejections(scheduler, monkeypatch)
        llm.generate(prompts, params, use_tqdm=False)
    assert not rejected
    assert len(accepted) > 50, "hardly anything was verified"


# The drafter's KV


class FreshKV:
    """What the drafter's cache should hold: computed at once, by the model alone."""

    def __init__(self, folder: Path) -> None:
        self.built = load(folder, max_model_len=256)

    def of(self, tokens: Any) -> torch.Tensor:
        """[2, K, len(tokens), H] of its only layer."""
        harness = Harness(self.built, num_seqs=1, max_len=256)
        harness.step({0: tokens})
        return take(self.built.attention_layers[0].kv_cache, harness.block_table[0].tolist(), len(tokens))


def take(kv_cache: torch.Tensor, blocks: list[int], num_tokens: int) -> torch.Tensor:
    """[2, K, num_tokens, H]: the first tokens of a block table."""
    return kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens]


def blocks_of(engine: Any, slot: int, table: int) -> list[int]:
    """A slot's in one of the worker's tables."""
    return worker_of(engine).runner.slots.block_tables[table][slot].tolist()


def test_the_drafters_kv_has_no_holes(tiny: Path, tiny_draft: Path) -> None:
    """After prompt chunks, prefix hits, 0 to 4 drafts of which some stand, preemptions and aborts."""
    prompts, params = random_requests(40, seed=8)
    config = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 36, "max_num_seqs": 12}
    engine = LLMEngine(
        EngineConfig.from_options({"model": str(tiny), **BASE, **config, **drafting(tiny_draft)})
    )
    scheduler, fresh = engine_of(engine).scheduler, FreshKV(tiny_draft)
    want_at_random(scheduler, random.Random(9), NUM_DRAFTS)
    ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    (layer,) = worker_of(engine.engine).models[1].attention_layers
    num_steps, seen = 0, list[int]()
    while not engine.is_finished():
        engine.step()
        num_steps += 1
        if num_steps % 10 == 0:
            engine.abort(ids[num_steps // 10])
        begun = [seq for seq in scheduler.running() if scheduler.table.computed[seq.slot]]
        for seq in begun[num_steps % max(1, len(begun)) :][:1]:  # another one in every step
            num_computed = int(scheduler.table.computed[seq.slot])
            held = take(layer.kv_cache, blocks_of(engine.engine, seq.slot, layer.table), num_computed)
            known = fresh.of(scheduler.table.tokens(seq.slot)[:num_computed])
            torch.testing.assert_close(held, known, rtol=1e-4, atol=1e-4)
            seen.append(num_computed)
    counters = scheduler.counters
    assert counters.num_preemptions and counters.num_cached_tokens and counters.num_accepted_tokens
    assert len(seen) > 40 and max(seen) > 60, "hardly anything was looked at"
    engine.shutdown()


def test_aborted_requests_leave_the_others_alone(tiny: Path, tiny_draft: Path) -> None:
    prompts, params = random_requests(24, seed=10)
    with LLM(str(tiny), **BASE) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    small = {"depth": 2, "num_gpu_blocks_override": 40}
    config = EngineConfig.from_options({"model": str(tiny), **BASE, **small, **drafting(tiny_draft)})
    engine = LLMEngine(config)
    ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    tokens: dict[str, list[int]] = {}
    aborted = [3, 8, 15]
    while not engine.is_finished():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        if engine.stats.num_steps in (2, 3, 4):
            engine.abort(ids[aborted[engine.stats.num_steps - 2]])
    kept = [i for i in range(24) if i not in aborted]
    assert [tokens[ids[i]] for i in kept] == [expected[i] for i in kept]
    assert engine_of(engine).scheduler.kv.usage == 0
    engine.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_may_end_anywhere_before_the_longest_length(tiny: Path, depth: int) -> None:
    longest, prompt = 64, list(range(1, 65))
    params = SamplingParams(temperature=0, ignore_eos=True)
    options = {**BASE, "max_model_len": longest, "depth": depth, "num_gpu_blocks_override": 5}
    prompts = [prompt[: longest - room] for room in range(1, 2 * NUM_DRAFTS + 2)]
    with LLM(str(tiny), **options) as llm:
        expected = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    with LLM(str(tiny), **options, **drafting(tiny)) as llm:
        outputs = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    assert outputs == expected
    assert [len(tokens) for tokens in outputs] == list(range(1, 2 * NUM_DRAFTS + 2))


@pytest.mark.parametrize(("num_kv_heads", "table"), [(2, 0), (1, 1)])
def test_a_page_has_a_part_of_both_models(tiny: Path, tmp_path: Path, num_kv_heads: int, table: int) -> None:
    draft = write_checkpoint(tmp_path, num_hidden_layers=1, num_key_value_heads=num_kv_heads)
    prompts, params = random_requests(6, seed=3)
    with LLM(str(tiny), **BASE) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny), **BASE, cpu_kv_cache_gib=1 / 256, **drafting(draft)) as llm:
        assert expected == [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        capacity = llm.llm_engine.capacity
        layers = [layer for model in models_of(llm) for layer in model.attention_layers]
        page_bytes = worker_of(llm.llm_engine.engine).layout.page_bytes
    assert capacity.kinds == (Full(16, 1),)
    assert sorted(layer.table for layer in layers) in ([0, 0, table], [0, 1, 1])
    assert page_bytes >= sum(layer.kv_cache[0].nbytes for layer in layers)
    assert (1 << 22) - page_bytes < (capacity.num_pages + 1) * page_bytes <= 1 << 22


def test_a_verification_costs_one_pass_a_draft(tiny: Path, tiny_draft: Path) -> None:
    """The first one feeds the two newest tokens; a prompt has a pass of its own before."""
    with LLM(str(tiny), **BASE, **drafting(tiny_draft)) as llm:
        model, queries = models_of(llm)[1].model, list[list[int]]()
        model.register_forward_pre_hook(lambda _, args: queries.append(args[0].query_lens))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
    prompts, verification = [[3, 2], *[[1, 1]] * NUM_DRAFTS], [[2, 2], *[[1, 1]] * (NUM_DRAFTS - 1)]
    assert queries[: len(prompts)] == prompts
    assert queries[len(prompts) :][: len(verification)] == verification


def test_for_the_textbooks_test_drafts_come_with_what_they_were_drawn_from(tiny: Path) -> None:
    spec = {"model": str(tiny), "num_speculative_tokens": 3, "rejection_sample_method": "standard"}
    spec["adaptive"] = False
    with LLM(str(tiny), **BASE, speculative_config=spec) as llm:
        worker = worker_of(llm.llm_engine.engine)
        proposer = worker.runner.launcher.step.proposer  # type: ignore[attr-defined]
        propose, drafted = proposer.propose, []
        proposer.propose = lambda *args: drafted.append(propose(*args)) or drafted[-1]
        params = [SamplingParams(temperature=t, max_tokens=2, seed=1) for t in (0.0, 0.9)]
        llm.generate([[5, 6, 7], [5, 6, 7]], params, use_tqdm=False)
    drafts = drafted[0]
    probs = drafts.probs.dense(320)
    assert probs.shape == (2, 3, 320) and probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))
    chosen = probs.gather(2, drafts.tokens[..., None].long())[..., 0]
    assert (chosen[0] == 1).all() and (chosen[1] > 0).all() and (chosen[1] < 1).all()


# What cannot draft


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"vocab_size": 128}, "cannot draft for .*: its vocabulary has 128 tokens, the model's 320"),
        ({"max_position_embeddings": 128}, "max_model_len is 256, but .* draft model .* 128 positions"),
    ],
    ids=str,
)
def test_a_draft_model_that_does_not_fit_is_named(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "draft", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny), **BASE, **drafting(folder))


def test_another_tokenizer_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "draft")
    file = folder / "tokenizer.json"
    assert '"q":' in file.read_text()
    file.write_text(file.read_text().replace('"q":', '"Q":', 1))
    with pytest.raises(ValueError, match="their tokenizers differ, first in token"):
        LLM(str(tiny), **BASE, **drafting(folder))
    with LLM(str(tiny), **BASE, **drafting(folder), skip_tokenizer_init=True) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)


def test_it_is_split_over_the_ranks_of_the_model(tiny: Path) -> None:
    spec = {"model": str(tiny), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="draft_tensor_parallel_size is 2, must be 1"):
        LLM(str(tiny), **BASE, speculative_config=spec)


def test_it_may_be_quantized_alone(tiny: Path, tiny_draft: Path) -> None:
    prompts, params = random_requests(8, seed=11)
    spec = {"model": str(tiny_draft), "num_speculative_tokens": 3, "quantization": "int8"}
    with LLM(str(tiny), **BASE) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny), **BASE, speculative_config=spec) as llm:
        schemes = [type(model.model.layers[0].attend.qkv.method).__name__ for model in models_of(llm)]
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert schemes[0] != schemes[1]


def models_of(llm: LLM) -> tuple:
    return worker_of(llm.llm_engine.engine).models
