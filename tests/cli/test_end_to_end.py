"""Every command runs on a real engine, a tiny one with random weights."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from pellucid.cli import console
from pellucid.cli.chat import Chat
from pellucid.cli.main import main
from pellucid.llm import LLM
from pellucid.sampling_params import SamplingParams


@pytest.fixture
def pellucid(engine, monkeypatch, capsys):
    """Run a command on the tiny model; its exit status, stdout and stderr."""

    def pellucid(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = main([*argv, *engine])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return pellucid


GREEDY = ["--temperature", "0", "--ignore-eos"]


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_writes_json_lines_in_the_order_of_the_prompts(pellucid):
    status, out, _ = pellucid("generate", "one", "and two", "--json", "--max-tokens", "5", *GREEDY)
    entries = json_lines(out)
    assert status == 0
    assert [(entry["index"], entry["prompt"]) for entry in entries] == [(0, "one"), (1, "and two")]
    for entry in entries:
        (completion,) = entry["outputs"]
        assert len(completion["token_ids"]) == 5
        assert completion["finish_reason"] == "length"
        assert "logprobs" not in completion


def test_generate_says_the_same_alone_as_in_company_and_as_text(pellucid):
    _, together, _ = pellucid("generate", "one", "two", "--json", "--max-tokens", "6", *GREEDY)
    _, alone, _ = pellucid("generate", "-", "--max-tokens", "6", *GREEDY, stdin="two\n")
    assert alone == json_lines(together)[1]["outputs"][0]["text"] + "\n"


def test_generate_reports_logprobs_that_were_asked_for(pellucid):
    _, out, _ = pellucid(
        "generate", "abc", "--json", "--max-tokens", "2", "--logprobs", "3", "--prompt-logprobs", "1", *GREEDY
    )
    (entry,) = json_lines(out)
    first = entry["outputs"][0]["logprobs"][0]
    assert [candidate["rank"] for candidate in first] == [1, 2, 3]
    assert first[0]["token_id"] == entry["outputs"][0]["token_ids"][0]
    assert entry["prompt_logprobs"][0] is None and len(entry["prompt_logprobs"]) == 3


def test_generate_makes_several_completions(pellucid):
    _, out, _ = pellucid("generate", "abc", "--n", "3", "--max-tokens", "4", "--ignore-eos")
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- prompt 0, completion {index} ---" for index in range(3)
    ]


def test_generate_puts_a_chat_into_the_template(pellucid):
    _, out, _ = pellucid("generate", "hi", "--chat", "--no-think", "--json", "--max-tokens", "2", *GREEDY)
    (entry,) = json_lines(out)
    assert entry["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_generate_writes_token_ids_where_there_is_no_tokenizer(pellucid):
    status, out, _ = pellucid(
        "generate", "--ids", "1,2,3", "--skip-tokenizer-init", "--max-tokens", "4", *GREEDY
    )
    assert status == 0
    assert len(out.split()) == 4 and all(0 <= int(token) < 259 for token in out.split())


def test_a_prompt_that_is_too_long_is_refused_in_one_line(pellucid):
    status, out, err = pellucid("generate", "x" * 600, "--json")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "600" in err and "512" in err


def test_a_folder_that_does_not_exist_is_refused_in_one_line(capsys):
    assert main(["generate", "hi", "--model", "/nowhere/at/all"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "/nowhere/at/all" in err


def test_chat_answers_each_line_of_a_piped_stdin_until_exit(pellucid):
    status, out, _ = pellucid(
        "chat",
        "--max-tokens",
        "4",
        *GREEDY[:2],
        stdin="hi\n/think off\n/nonsense\n/clear\nho\n/exit\nunread\n",
    )
    assert status == 0
    assert out.count("time to first token") == 2
    assert "thinking is off" in out and "/nonsense is no command" in out
    assert "> ho" in out and "unread" not in out


def test_chat_ends_where_its_input_ends(pellucid):
    status, out, _ = pellucid("chat", "--max-tokens", "2", stdin="hi")
    assert status == 0 and out.startswith("> hi")


SMALL = {"load_format": "dummy", "device": "cpu", "cpu_kv_cache_gib": 0.02, "max_num_seqs": 8}


@pytest.fixture
def llm(model_folder):
    with LLM(str(model_folder), **SMALL, max_num_batched_tokens=128) as llm:
        yield llm


def test_a_chat_remembers_its_turns_until_it_is_cleared(llm):
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=3), system="Be brief.", think=None)
    chat.answer("hi")
    chat.answer("and now?")
    assert [message["role"] for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    chat.command("/clear")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_thinking_that_the_template_opens_is_shown_and_forgotten(model_folder, tmp_path, capsys):
    folder = shutil.copytree(model_folder, tmp_path / "thinker")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "<think>\n"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(str(folder), **SMALL) as llm:
        (letter,) = llm.get_tokenizer().encode("a")
        cut_off = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={letter: 100})
        chat = Chat(llm, cut_off, system=None, think=None)
        chat.answer("hi")
    assert capsys.readouterr().out.startswith("<think>\naaa\n")
    assert chat.messages[-1] == {"role": "assistant", "content": ""}


def test_a_question_too_long_for_the_context_is_refused_and_forgotten(llm, capsys):
    chat = Chat(llm, SamplingParams(max_tokens=3), system=None, think=None)
    chat.answer("x" * 600)
    assert chat.messages == []
    assert "/clear" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_leaves_the_engine_ready(llm, monkeypatch):
    (letter,) = llm.get_tokenizer().encode("a")  # white space would be held back, as a tag may follow
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, logit_bias={letter: 100})
    chat = Chat(llm, endless, system=None, think=None)
    written: list[str] = []

    def interrupt_once(text: str, style: str | None = None) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "write", interrupt_once)
    chat.answer("hi")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert 0 < len(str(chat.messages[1]["content"])) < 400
    assert llm.llm_engine.is_finished()
    assert len(llm.generate("ho", SamplingParams(max_tokens=2, ignore_eos=True))[0]["token_ids"]) == 2


def test_demo_shows_its_parts_and_the_speed(pellucid):
    status, out, _ = pellucid("demo")
    assert status == 0
    for title in ("a chat, with thinking", "a tool call", "a completion"):
        assert f"--- {title} ---" in out
    last = out.splitlines()[-1]
    assert last.startswith("prompt ") and "tok/s | output " in last and last.endswith(" ms")


def test_bench_throughput_counts_every_token_and_caches_none(pellucid, tmp_path):
    file = tmp_path / "figures.json"
    status, out, _ = pellucid(
        "bench", "throughput", "--workload", "random", "--num-requests", "12", "--input-len", "70:90",
        "--output-len", "5:9", "--repeat", "2", "--json", str(file),
    )  # fmt: skip
    assert status == 0 and "share of the limit" in out
    (figures,) = json.loads(file.read_text())
    assert figures["num_requests"] == 12 and 840 <= figures["num_prompt_tokens"] <= 1080
    assert figures["num_cached_tokens"] == 0  # although the same prompts ran twice
    assert len(figures["all_seconds"]) == 2 and figures["seconds"] in figures["all_seconds"]
    assert figures["output_tokens_per_second"] == pytest.approx(
        figures["num_output_tokens"] / figures["seconds"]
    )
    assert 0 < figures["share_of_limit"] == pytest.approx(figures["limit_seconds"] / figures["seconds"])


def test_bench_marks_what_chance_has_accepted(pellucid, tmp_path):
    path = tmp_path / "figures.json"
    config = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3,
    }
    status, out, _ = pellucid(
        "bench", "latency", "--input-len", "16", "--output-len", "20", "--repeat", "1",
        "--speculative-config", json.dumps(config), "--json", str(path),
    )  # fmt: skip
    (figures,) = json.loads(path.read_text())
    assert status == 0 and figures["is_synthetic"] and "SYNTHETIC" in out
    assert figures["spec_decode_num_draft_tokens"] == 2 * figures["spec_decode_num_drafts"] > 0
    assert "spec_decode_num_accepted_tokens_per_pos" in out
    assert figures["mean_accepted_length"] > 2.5  # the text's end cuts the last verification
    assert figures["share_of_limit"] is None, "nobody knows how many tokens a step can yield"


def test_bench_latency_measures_each_batch_size(pellucid, tmp_path):
    file = tmp_path / "figures.json"
    pellucid(
        "bench", "latency", "--batch-size", "1", "4", "--input-len", "16", "--output-len", "8",
        "--repeat", "1", "--json", str(file),
    )  # fmt: skip
    figures = json.loads(file.read_text())
    assert [each["num_requests"] for each in figures] == [1, 4]
    for each in figures:
        assert each["ms_per_step"] == pytest.approx(1000 * each["seconds"] / 8)


def test_bench_profiles_host_and_device(pellucid, tmp_path):
    file = tmp_path / "trace.json"
    status, out, _ = pellucid(
        "bench", "throughput", "--workload", "random", "--num-requests", "3", "--input-len", "20",
        "--output-len", "4", "--repeat", "1", "--profile", str(file),
    )  # fmt: skip
    assert status == 0 and "idles" in out and "aten::mm" in out
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    host = [span for span in spans if span["pid"] == 1]
    names = {span["name"] for span in host}
    assert names == {"plan", "launch", "wait", "unpack", "commit", "step", "outputs"}
    launches = [span for span in host if span["name"] == "launch"]
    assert launches[0]["args"]["rows"] == 3 and launches[0]["args"]["tokens"] == 60
    first, last = launches[0], launches[-1]
    during = [s for s in spans if s["pid"] == 2 and first["ts"] <= s["ts"] <= last["ts"] + last["dur"]]
    assert any(span["name"] == "aten::mm" for span in during), "the clocks of host and device differ"


def test_bench_profiles_one_workload(pellucid, tmp_path):
    file = str(tmp_path / "trace.json")
    status, _, err = pellucid("bench", "latency", "--batch-size", "1", "2", "--profile", file)
    assert status == 2 and "--profile shows one workload, not 2" in err
    status, _, err = pellucid("bench", "latency", "--profile", "/nowhere/trace.json")
    assert status == 2 and "--profile '/nowhere/trace.json' cannot be written" in err


def test_bench_refuses_requests_longer_than_the_context(pellucid):
    status, _, err = pellucid("bench", "throughput")
    assert status == 2 and "max_model_len is 512" in err


@pytest.fixture
def items(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    question = {
        "task": "add", "kind": "exact", "max_tokens": 4, "messages": [{"role": "user", "content": "1+1=?"}],
        "answer": "no dummy says this",
    }  # fmt: skip
    lines = [{**question, "id": f"add-{n}", "enable_thinking": bool(n % 2)} for n in range(4)]
    (folder / "add.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"id": "t", "task": "prose", "kind": "text_bpb", "text": "def f(x):\n    return x\n" * 40}]
    (folder / "prose.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def test_eval_scores_each_task_and_mode(pellucid, items, tmp_path):
    file = tmp_path / "scores.json"
    status, out, _ = pellucid("eval", "--items", str(items), "--show-failures", "1", "--json", str(file))
    assert status == 0 and "no dummy says this" in out
    report = json.loads(file.read_text())
    scores = {(score["task"], score["mode"]): score for score in report["scores"]}
    assert scores["add", "thinking"]["items"] == scores["add", "direct"]["items"] == 2
    assert scores["add", "direct"]["exact_match"] == 0.0
    assert len(report["wrong"]) == 4
    # Random weights know nothing: about log2(259) bits for each token, which here is a byte.  The text is
    # longer than the context, so windows are joined, too.
    assert scores["prose", "text"]["bits_per_byte"] == pytest.approx(8.0, abs=0.5)


def test_eval_shows_a_quantized_model_beside_the_plain_one(pellucid, items, tmp_path):
    file = tmp_path / "scores.json"
    how = ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--json", str(file))
    _, plain, _ = pellucid("eval", "--items", str(items), "--json", str(file))
    expected = json.loads(file.read_text())
    _, beside, _ = pellucid("eval", "--items", str(items), *how)
    report = json.loads(file.read_text())
    assert "baseline" in beside and "baseline" not in plain
    assert report["baseline"] == expected["scores"] and "baseline" not in expected
    (bits, plain_bits) = (each[-1]["bits_per_byte"] for each in (report["scores"], report["baseline"]))
    assert bits != plain_bits and bits == pytest.approx(plain_bits, rel=0.05)
    pellucid("eval", "--items", str(items), *how, "--no-baseline")
    assert "baseline" not in json.loads(file.read_text())


def test_eval_counts_a_right_answer(pellucid, items, tmp_path, engine):
    file = tmp_path / "scores.json"
    pellucid("eval", "--items", str(items), "--tasks", "add", "--json", str(file))
    said = json.loads(file.read_text())["wrong"][0]
    lines = [json.loads(line) for line in (items / "add.jsonl").read_text().splitlines()]
    right = next(line for line in lines if line["id"] == said["id"])
    right["answer"] = said["text"].split("</think>")[-1].strip()
    (items / "add.jsonl").write_text(json.dumps(right))
    pellucid("eval", "--items", str(items), "--tasks", "add", "--json", str(file))
    (score,) = json.loads(file.read_text())["scores"]
    assert score["exact_match"] == 1.0
