"""The tiers under a tiny model: what the cache has lost comes back, with the tokens that it had."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.connectors.tiers.files import HEADER
from pellucid.connectors.tiers.host import Tiers
from pellucid.connectors.tiers.worker import Lane
from pellucid.connectors.tiers.worker import Tiers as WorkerTiers
from tests.tiny import write_checkpoint, write_latent_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * n) % 90 + 5 for i in range(100)] for n in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_llm(model: Path, **options: Any) -> LLM:
    few: dict[str, Any] = {
        "block_size": 16,
        "max_model_len": 128,
        "num_gpu_blocks_override": 9,
        "max_num_seqs": 2,
    }
    few |= {"device": "cpu", "dtype": "float32", "check_invariants": True}
    return LLM(str(model), **(few | options))


def answers(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [llm.generate([{"prompt_token_ids": each}], PARAMS)[0].outputs[0].token_ids for each in prompts]


def tiers_of(llm: LLM) -> Tiers:
    tiers = llm.llm_engine.engine.scheduler.features._features["kv_transfer"].connector  # type: ignore
    assert isinstance(tiers, Tiers)
    return tiers


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    llm = make_llm(tiny, enable_prefix_caching=False)
    tokens = answers(llm, PROMPTS)
    llm.shutdown()
    return tokens


LAYOUTS = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tp", "pp"])
def test_what_the_cache_has_lost_comes_back_from_the_host(
    tiny: Path, expected: list[list[int]], layout: dict[str, int]
) -> None:
    llm = make_llm(tiny, kv_offloading_size=0.01, **layout)
    assert answers(llm, PROMPTS) == expected
    before = llm.llm_engine.engine.stats().num_cached_tokens
    assert answers(llm, PROMPTS) == expected
    assert llm.llm_engine.engine.stats().num_cached_tokens >= before + 3 * 96
    stats = tiers_of(llm).stats
    told = llm.llm_engine.engine.stats().of_features
    # A block has 16 keys and values of two heads in two layers, 16 numbers each, of 4 bytes.
    assert told["kv_tiers_host_bytes_loaded"] == stats.host_blocks_loaded * 16 * 2 * 2 * 2 * 16 * 4
    assert told["kv_tiers_hits"] == stats.hits
    assert 18 <= told["kv_tiers_host_pages_now"] <= told["kv_tiers_host_room_now"]
    assert "kv_tiers_disk_pages_now" not in told
    assert stats.hits >= 3 and stats.host_blocks_loaded >= 18 and not stats.failed_loads
    llm.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["one", "tp"])
def test_a_folder_outlives_the_engine(
    tiny: Path, expected: list[list[int]], tmp_path: Path, layout: dict[str, int]
) -> None:
    options = layout | {"kv_offloading_path": str(tmp_path), "kv_offloading_size": 0.01}
    llm = make_llm(tiny, **options)
    assert answers(llm, PROMPTS) == expected
    llm.shutdown()
    again = make_llm(tiny, **options)
    assert len(tiers_of(again).disk) >= 18
    told = tiers_of(again).counters()
    assert 18 <= told["kv_tiers_disk_pages_now"] <= told["kv_tiers_disk_room_now"]
    assert answers(again, PROMPTS) == expected
    stats = tiers_of(again).stats
    assert stats.disk_blocks_loaded >= 18 and stats.failed_loads == 0
    again.shutdown()


def test_a_changed_file_costs_a_recomputation_and_one_line(
    tiny: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"kv_offloading_path": str(tmp_path), "kv_offloading_size": 0.01}
    llm = make_llm(tiny, **options)
    answers(llm, PROMPTS)
    llm.shutdown()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for i, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data if i % 2 else data[: len(data) // 2])
    caplog.set_level(logging.WARNING)
    again = make_llm(tiny, **options)
    assert answers(again, PROMPTS) == expected
    assert tiers_of(again).stats.failed_loads >= 1
    again.shutdown()
    lines = [record for record in caplog.records if "left out" in record.message]
    assert len(lines) == 1


def test_a_folder_that_hangs_costs_the_time_that_loads_are_waited_for(
    tiny: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"shared_storage_path": str(tmp_path), "cpu_bytes_to_use": 10**7}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": extra,
        "kv_load_seconds": 0.5,
    }
    llm = make_llm(tiny, kv_transfer_config=config, num_gpu_blocks_override=24)
    answers(llm, PROMPTS)
    llm.shutdown()
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.unlink()
        os.mkfifo(path)  # who opens it waits until somebody writes
    again = make_llm(tiny, kv_transfer_config=config, num_gpu_blocks_override=24)
    assert answers(again, PROMPTS) == expected
    assert tiers_of(again).stats.hits == 1, "while it hangs nobody else waits for it"
    monkeypatch.setattr("pellucid.connectors.tiers.worker.LEAVE_SECONDS", 0.1)
    again.shutdown()
    for path in tmp_path.rglob("*.0"):  # or the threads would hold the process up
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_what_is_another_models_or_in_another_form_is_not_looked_into(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_offloading_path": str(tmp_path / "kv"), "kv_offloading_size": 0.01}
    options["dtype"] = "bfloat16"
    llm = make_llm(tiny, **options)
    answers(llm, PROMPTS[:1])
    settle(llm)
    llm.shutdown()
    other = write_checkpoint(tmp_path / "other", seed=1)
    for model, change, num in (
        (tiny, {}, 6),
        (other, {}, 0),
        (tiny, {"dtype": "float16"}, 0),  # as many bytes
        (tiny, {"kv_cache_dtype": "fp8", "block_size": 32}, 0),  # and again
    ):
        again = make_llm(model, **(options | change))
        assert len(tiers_of(again).disk) == num, change
        again.shutdown()


def test_fp8_kv_and_small_tiers_that_forget(tiny: Path, tmp_path: Path) -> None:
    most = 4 * 16 * 2 * 2 * 2 * 16  # four blocks, of a byte a number
    plain = make_llm(tiny, kv_cache_dtype="fp8")
    expected = answers(plain, PROMPTS)
    plain.shutdown()
    llm = make_llm(
        tiny,
        kv_cache_dtype="fp8",
        kv_transfer_config={
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_extra_config": {
                "num_cpu_blocks": 14, "shared_storage_path": str(tmp_path), "disk_bytes_to_use": most,
            },
        },
    )  # fmt: skip
    for _ in range(2):
        assert answers(llm, PROMPTS) == expected
        assert answers(llm, PROMPTS[2:3]) == expected[2:3]
        settle(llm)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size - HEADER.size for path in files)
    assert tiers_of(llm).stats.disk_blocks_saved > 4 and size == most
    assert tiers_of(llm).stats.host_blocks_loaded + tiers_of(llm).stats.disk_blocks_loaded >= 6
    tiers_of(llm).check()
    llm.shutdown()


WINDOWS = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}


@pytest.mark.parametrize("kind", ["windows", "latent"])
def test_other_kinds_of_cache_come_back_too(kind: str, tmp_path: Path) -> None:
    model = write_latent_checkpoint(tmp_path) if kind == "latent" else write_checkpoint(tmp_path, **WINDOWS)
    plain = make_llm(model, num_gpu_blocks_override=30)
    expected = answers(plain, PROMPTS)
    plain.shutdown()
    options = {"kv_offloading_size": 0.01, "kv_offloading_path": str(tmp_path / "kv")}
    llm = make_llm(model, num_gpu_blocks_override=18 if kind == "windows" else 9, **options)
    for _ in range(2):
        assert answers(llm, PROMPTS) == expected
    assert tiers_of(llm).stats.host_blocks_loaded >= 18
    settle(llm)
    tiers_of(llm).check()
    llm.shutdown()


def settle(llm: LLM) -> None:
    """Until nothing is under way, on the disk's side, too."""
    engine, tiers = llm.llm_engine.engine, tiers_of(llm)
    while engine.has_work or tiers._writing:
        engine.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_loaded_on_a_gpu_is_what_was_saved(tiny: Path, tmp_path: Path) -> None:
    few = {"device": "cuda", "kv_offloading_path": str(tmp_path), "kv_offloading_size": 0.01}
    llm = make_llm(tiny, **few)
    expected = answers(llm, PROMPTS)
    for _ in range(2):
        assert answers(llm, PROMPTS) == expected
    assert tiers_of(llm).stats.host_blocks_loaded >= 18
    llm.shutdown()
    again = make_llm(tiny, **few)
    assert answers(again, PROMPTS) == expected and tiers_of(again).stats.disk_blocks_loaded >= 18
    again.shutdown()


def test_who_clears_the_prefix_cache_clears_the_tiers(tiny: Path, expected: list[list[int]]) -> None:
    llm = make_llm(tiny, kv_offloading_size=0.01)
    answers(llm, PROMPTS)
    llm.llm_engine.engine.clear_prefix_cache()
    assert answers(llm, PROMPTS) == expected
    assert tiers_of(llm).stats.host_blocks_loaded == 0
    llm.shutdown()


def test_pages_are_let_go_of_behind_all_copies() -> None:
    door: Any = SimpleNamespace(device=torch.device("cpu"))
    tiers, done = WorkerTiers(door, {"num_cpu_blocks": 4}), list[int]()
    lane = tiers._lanes["save"] = Lane("kv save", door.device)
    lane.put(lambda _: (time.sleep(0.1), done.append(1))[1])
    tiers.release()
    assert done == [1]
    tiers.close()


@pytest.mark.parametrize(
    "options,match",
    [
        ({"kv_transfer_config": {"kv_connector": "Offloading"}}, "did you mean"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "how much host memory"),
        ({"kv_transfer_config": {"kv_conector": "x"}}, "did you mean 'kv_connector'"),
        ({"kv_offloading_size": 1e-9}, "raise kv_offloading_size"),
        ({"kv_offloading_size": -1.0}, "must be above 0"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "let prefixes be cached"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_llm(tiny, **options)


def test_keys_of_vllms_that_mean_nothing_are_told(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {
        "kv_connector": "OffloadingConnector",
        "kv_rank": 0,
        "kv_connector_extra_config": {"num_cpu_blocks": 4},
    }
    make_llm(tiny, kv_transfer_config=said).shutdown()
    assert "kv_rank in kv_transfer_config has no effect" in caplog.text
