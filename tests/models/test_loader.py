"""Loading: every tensor arrives, and one that is missing, misshapen or unknown is named."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pellucid.collector import trim
from pellucid.config import ModelConfig
from pellucid.dist.collectives import SingleRank
from pellucid.dist.mesh import Stage
from pellucid.layers.linear import Linear
from pellucid.layers.weight import Weight
from pellucid.models import loader
from pellucid.models.build import BuildOptions, BuiltModel, build, design
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.decoder import Decoder
from pellucid.models.fields import Fields
from pellucid.models.head import Lender
from pellucid.models.kinds import kinds_of
from pellucid.models.loader import check_tied, torch_module, weights_of
from pellucid.weights.source import Shards
from tests.models.conftest import Folder
from tests.models.harness import CPU, Harness, load

OPTIONS = BuildOptions(
    dtype=torch.float32,
    device=torch.device("cpu"),
    block_size=16,
    max_model_len=64,
    show_progress=False,
)


def load_folder(folder: Folder) -> BuiltModel:
    return load(folder.write(), max_model_len=64)


def dummy(folder: Folder, *, seed: int, dtype: torch.dtype = torch.float32) -> BuiltModel:
    folder.write()
    model = ModelConfig(model=str(folder.path), load_format="dummy")
    return build(Checkpoint.open(model), CPU, replace(OPTIONS, seed=seed, dtype=dtype), "torch")


def test_every_tensor_arrives_in_the_wanted_dtype(folder: Folder) -> None:
    for weight in weights_of(load_folder(folder).model):
        arrived = torch.cat([folder.tensors[source] for source in weight.sources])
        assert weight.dtype == torch.float32
        assert torch.equal(weight, arrived.float())


def test_missing_tensors_are_named(folder: Folder) -> None:
    del folder.tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight;"):
        load_folder(folder)


def test_of_many_missing_tensors_five_are_named(folder: Folder) -> None:
    folder.config["num_hidden_layers"] = 3
    with pytest.raises(ValueError, match=r"missing: (model\.layers\.2\.\S+; ){4}\S+ and 6 more;"):
        load_folder(folder)


def test_misshapen_tensors_are_named_with_both_shapes(folder: Folder) -> None:
    folder.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(20, 16)
    words = r"mlp\.up_proj\.weight has shape \(20, 16\), this model expects \(24, 16\)"
    with pytest.raises(ValueError, match=words):
        load_folder(folder)


@pytest.mark.parametrize("size", [0, 20, 1000])
def test_a_file_that_is_cut_off_is_named(folder: Folder, size: int) -> None:
    shard = folder.write() / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model-1\.safetensors is no whole safetensors file"):
        load(folder.path, max_model_len=64)


def test_tensors_that_nobody_claims_are_named(folder: Folder) -> None:
    folder.tensors["model.layers.0.self_attn.q_proj.lora_A"] = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"no use for these tensors: model\S+lora_A \(2, 16\);"):
        load_folder(folder)


def test_old_rotary_buffers_are_passed_over(folder: Folder) -> None:
    folder.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    load_folder(folder)


@pytest.mark.parametrize("duplicate", [True, False])
def test_a_tied_head_needs_no_tensor_and_minds_none(folder: Folder, duplicate: bool) -> None:
    folder.config["tie_word_embeddings"] = True
    if duplicate:
        folder.tensors["lm_head.weight"] = folder.tensors["model.embed_tokens.weight"].float()
    else:
        del folder.tensors["lm_head.weight"]
    model = load_folder(folder).model
    hidden = torch.randn(3, 16)
    expected = hidden @ folder.tensors["model.embed_tokens.weight"].float().T
    torch.testing.assert_close(model.logits(hidden), expected)


def test_a_tied_head_with_numbers_of_its_own_is_refused(folder: Folder) -> None:
    """transformers 4 passes over them, 5 over what config.json says."""
    folder.config["tie_word_embeddings"] = True
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight.* to false"):
        load_folder(folder)


def test_a_plain_head_is_not_compared_with_a_table_of_codes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"head": torch.ones(2, 4), "table": torch.full((2, 4), 3, dtype=torch.int8)}, file)
    check_tied(Shards([file], str), {"head": "table"})


def test_an_untied_head_needs_its_tensor(folder: Folder) -> None:
    del folder.tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight;"):
        load_folder(folder)


def test_dummy_weights_follow_from_the_seed(folder: Folder) -> None:
    def logits(seed: int) -> torch.Tensor:
        (scores,) = Harness(dummy(folder, seed=seed), num_seqs=1, max_len=16).step({0: [1, 2, 3]})
        return scores

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_dummy_weights_are_never_zero_and_norms_are_near_one(folder: Folder) -> None:
    for weight in weights_of(dummy(folder, seed=0).model):
        assert (weight != 0).all()
        center = 1.0 if weight.dim() == 1 else 0.0
        assert abs(weight.mean() - center) < 0.02


def test_a_tied_head_is_packed_beside_its_table(folder: Folder) -> None:
    """The table of embeddings must stay as it is: rows cannot be read from a packed matrix."""
    folder.config["tie_word_embeddings"] = True
    built = dummy(folder, seed=0, dtype=torch.bfloat16)
    sources = [source for weight in weights_of(built.model) for source in weight.sources]
    assert "model.embed_tokens.weight" in sources
    (logits,) = Harness(built, num_seqs=1, max_len=16).step({0: [1, 2, 3]})
    assert logits.isfinite().all()


def stages(folder: Folder, **changes: object) -> list[BuiltModel]:
    """Both stages of the model, cut after its first layer."""
    folder.config |= changes
    folder.write()
    return [stage_of(folder, index) for index in (0, 1)]


def stage_of(folder: Folder, index: int) -> BuiltModel:
    checkpoint = Checkpoint.open(ModelConfig(model=str(folder.path)))
    return build(checkpoint, CPU, replace(OPTIONS, stage=Stage(index, (1,))), "torch")


def names_of(built: BuiltModel) -> set[str]:
    return {source for weight in weights_of(built.model) for source in weight.sources}


def test_each_stage_holds_its_layers_and_together_they_hold_all(folder: Folder) -> None:
    first, last = (names_of(built) for built in stages(folder))
    assert first.isdisjoint(last)
    assert first | last == names_of(load_folder(folder))
    assert "model.embed_tokens.weight" in first and {"model.norm.weight", "lm_head.weight"} <= last


def test_a_stage_that_lacks_a_tensor_is_told_and_the_other_is_not(folder: Folder) -> None:
    del folder.tensors["model.layers.1.mlp.up_proj.weight"]
    folder.write()
    stage_of(folder, 0)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight;"):
        stage_of(folder, 1)


def test_a_stranger_among_the_tensors_is_named_by_every_stage(folder: Folder) -> None:
    folder.tensors["model.layers.1.mlp.up_proj.lora_A"] = torch.zeros(2, 16)
    folder.write()
    for index in (0, 1):
        with pytest.raises(ValueError, match=r"no use for these tensors: model\S+lora_A"):
            stage_of(folder, index)


def test_what_is_elsewhere_is_not_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write()
    names, read = list[str](), Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: names.append(name) or read(self, name))
    first = stage_of(folder, 0)
    assert sorted(names) == sorted(names_of(first))


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4", "nf4"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_more_is_held_than_what_is_finished_and_one_layer(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, quantization: str | None, load_format: str
) -> None:
    """Bytes of weights, whoever holds them, when a layer has repacked or when the next has its own."""
    folder.config |= {"num_hidden_layers": 2, "intermediate_size": 32}
    for key in [key for key in folder.tensors if ".mlp." in key]:  # whole groups of inputs
        size = (16, 32) if "down" in key else (32, 16)
        folder.tensors[key] = torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16()
    folder.write()
    models, allocated, peak = list[torch.nn.Module](), list[weakref.ref[Weight]](), 0
    allocate = Weight.allocate

    def allocate_and_note(weight: Weight) -> None:
        allocate(weight)
        allocated.append(weakref.ref(weight))

    def look() -> None:
        nonlocal peak
        held = (*models[0].parameters(), *(weight for each in allocated if (weight := each()) is not None))
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in held}
        peak = max(peak, sum(storages.values()))

    finish = Linear.finish

    def finish_and_look(linear: Linear) -> None:
        look()
        finish(linear)
        look()

    fill_each = loader.fill_each
    monkeypatch.setattr(
        loader, "fill_each", lambda model, fill: models.append(model) or fill_each(model, fill)
    )
    monkeypatch.setattr(Linear, "finish", finish_and_look)
    monkeypatch.setattr(Weight, "allocate", allocate_and_note)
    model = ModelConfig(model=str(folder.path), load_format=load_format)
    options = replace(OPTIONS, dtype=torch.float32, quantization=quantization)
    build(Checkpoint.open(model), CPU, options, "torch")
    finished = sum(p.untyped_storage().nbytes() for p in models[0].parameters())
    largest = 4 * 50 * 16  # the head
    assert peak <= finished + largest
    if quantization:
        assert finished < 0.7 * sum(4 * math.prod(tensor.shape) for tensor in folder.tensors.values())


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> tuple[int, int]:
    """Bytes of this process in memory, now and at most."""
    found = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    now, most = (int(found[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


@pytest.mark.skipif(not FORGET.exists(), reason="needs Linux to tell what is resident")
@pytest.mark.parametrize("quantization", [None, "nf4", {"linear": "int8", "embedding": "int8"}], ids=str)
def test_a_process_grows_by_what_the_table_says_and_one_layer(
    folder: Folder, quantization: str | dict[str, object] | None
) -> None:
    """The system's count, which sees opaque layouts, and what the C library keeps of what is let go of."""
    options = replace(OPTIONS, dtype=torch.bfloat16, quantization=quantization)
    folder.config["intermediate_size"] = 32  # whole groups of inputs
    big = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 8192}
    for config in ({}, {**big, "tie_word_embeddings": True}):  # what is loaded once is there
        folder.config |= config
        folder.write()
        checkpoint = Checkpoint.open(ModelConfig(model=str(folder.path), load_format="dummy"))
        model = torch_module(design(checkpoint, CPU, options).model)
        told = sum(kind.kept_bytes for kind in kinds_of(model, {}, {}, options.dtype))
        gc.collect()
        trim()
        FORGET.write_text("5")
        before, _ = resident()
        kept = [build(checkpoint, CPU, options, "torch")]
        after, most = resident()
        kept.clear()
    largest, slack = 2 * 8192 * 512, 3 << 20
    assert abs(after - before - told) < slack, (after - before, told)
    if quantization is None:  # else what is rounded at once is beside it
        assert most - before < told + largest + slack, (most - before, told, largest)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_the_other_are_the_model(folder: Folder, tied: bool) -> None:
    """To the bit: what the cut adds up is what the next norm would have added."""
    if tied:
        del folder.tensors["lm_head.weight"]
    first, last = stages(folder, tie_word_embeddings=tied)
    work = {0: [1, 2, 3, 7]}
    (expected,) = Harness(load_folder(folder), num_seqs=1, max_len=16).step(work)
    assert first.inlet is None and last.inlet is not None
    last.inlet.stream = first.model(Harness(first, num_seqs=1, max_len=16).inputs(work))
    hidden = last.model(Harness(last, num_seqs=1, max_len=16).inputs(work))
    assert torch.equal(last.model.logits(hidden), expected)


def test_a_stage_lends_its_tied_table_while_it_is_plain(folder: Folder) -> None:
    del folder.tensors["lm_head.weight"]
    _, last = stages(folder, tie_word_embeddings=True)
    lender = Lender(model=last.model, config=Fields(folder.config), group=SingleRank())
    ids = torch.tensor([3, 5])
    assert torch.equal(lender.embedding()(ids), folder.tensors["model.embed_tokens.weight"][ids].float())
    assert isinstance(last.model, Decoder) and isinstance(last.model.head, Linear)
    last.model.head.replace("weight", None)  # as methods do that lay it out anew
    with pytest.raises(ValueError, match="embed_tokens of its own"):
        lender.embedding()


def test_dummy_weights_are_the_same_on_any_stage(folder: Folder) -> None:
    folder.write()
    checkpoint = Checkpoint.open(ModelConfig(model=str(folder.path), load_format="dummy"))
    whole, *parts = (
        {name: weight for weight in weights_of(built.model) for name in weight.sources}
        for built in (
            build(checkpoint, CPU, replace(OPTIONS, stage=stage), "torch")
            for stage in (Stage(), Stage(0, (1,)), Stage(1, (1,)))
        )
    )
    for part in parts:
        assert all(torch.equal(weight, whole[name]) for name, weight in part.items())


def test_every_stage_knows_what_all_layers_keep(folder: Folder) -> None:
    for built in stages(folder):
        assert len(built.attention_layers) == 1
        assert built.caches == (built.attention_layers[0].spec.cache,) * 2
