"""A tokenizer loads from a checkpoint's files and agrees with the libraries that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from pellucid.text.tokenizer import Tokenizer
from tests.text.conftest import save, train_byte_fallback, train_byte_level, train_metaspace, with_bos


def test_text_survives_encoding_and_decoding(family: dict[str, Tokenizer]) -> None:
    for name in ("byte_level", "byte_fallback", "gemma"):
        text = "hello world, 你好 😀\n\tSchöne Grüße"
        assert family[name].decode(family[name].encode(text)) == text, name


def test_a_batch_is_encoded_like_its_texts(byte_level: Tokenizer) -> None:
    texts = ["hello", "", "the cat", "你好"]
    assert byte_level.encode_batch(texts) == [byte_level.encode(text) for text in texts]


def test_special_tokens_are_known_by_name_and_id(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_id == byte_level.token_to_id("</s>") == 2
    assert byte_level.id_to_token(2) == "</s>"
    assert byte_level.special_ids == {0, 1, 2, 3, 4}
    assert byte_level.pad_token_id is None
    assert byte_level.token_to_id("no such token") is None
    assert byte_level.id_to_token(10**6) is None


def test_special_tokens_are_read_from_either_spelling(tmp_path: Path) -> None:
    save(tmp_path, train_byte_level(), {"eos_token": {"content": "<|im_end|>", "special": True}})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "pad_token": "<unk>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")  # the config outranks the map
    assert tokenizer.pad_token_id == 0


def test_a_file_may_be_named_in_place_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path, train_byte_level())
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_token_id == 2


@pytest.mark.parametrize(
    ("post_processor_adds", "config_adds", "has_bos"),
    [(True, None, True), (True, True, True), (True, False, False)]
    + [(False, None, False), (False, True, True), (False, False, False)],
)
def test_bos_is_added_as_the_config_says(
    tmp_path: Path, post_processor_adds: bool, config_adds: bool | None, has_bos: bool
) -> None:
    trained = with_bos(train_byte_level()) if post_processor_adds else train_byte_level()
    tokenizer = Tokenizer.load(save(tmp_path, trained, {"add_bos_token": config_adds}))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([1, *plain] if has_bos else plain)
    assert tokenizer.encode("<s>hello") == [1, *plain]


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, with_bos(train_byte_level())))
    assert tokenizer.encode("<s>hello") == tokenizer.encode("hello")


def test_ids_may_be_left_out(tmp_path: Path) -> None:
    trained = json.loads(train_byte_level().to_str())
    trained["model"]["vocab"]["a"] = 900
    tokenizer = Tokenizer.load(save(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(trained))))
    assert tokenizer.vocab_size == 901 and len(tokenizer.spell_all()) == 901
    assert tokenizer.spell_all()[899:] == [b"", b"a"]


@pytest.mark.parametrize("content", ["", "{}", "version https://git-lfs.github.com/spec/v1"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    trained = train_byte_level()
    trained.enable_truncation(2)
    trained.enable_padding(length=50)
    tokenizer = Tokenizer.load(save(tmp_path, trained))
    assert tokenizer.encode("hello there the cat") == train_byte_level().encode("hello there the cat").ids


def test_one_token_alone_has_its_bytes_and_its_space(byte_fallback: Tokenizer, byte_level: Tokenizer) -> None:
    the = byte_fallback.encode("the")[0]
    assert byte_fallback.token_text(the).startswith(" ")
    euro = byte_level.encode("€")
    assert b"".join(byte_level.token_bytes(i) for i in euro) == "€".encode()
    assert byte_level.token_text(euro[0]) == "\ufffd"
    assert byte_level.token_text(2) == "</s>"


def test_templates_are_found_wherever_checkpoints_keep_them(tmp_path: Path) -> None:
    save(tmp_path, train_byte_level(), {"chat_template": "from config"})
    assert Tokenizer.load(tmp_path).chat_template() == "from config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.load(tmp_path).chat_template() == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.load(tmp_path).chat_template() == "from jinja"


def test_the_tool_template_serves_chats_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = Tokenizer.load(save(tmp_path, train_byte_level(), {"chat_template": named}))
    assert tokenizer.chat_template() == "plain"
    assert tokenizer.chat_template(tools=True) == "with tools"


@pytest.mark.parametrize("value", [["plain"], [{"name": "default"}], 7])
def test_a_template_that_is_none_is_named_with_its_file(tmp_path: Path, value: object) -> None:
    save(tmp_path, train_byte_level(), {"chat_template": value})
    with pytest.raises(
        ValueError, match=r"chat_template in .*tokenizer_config\.json is .*must be a template"
    ):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*tokenizer=.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    save(tmp_path, train_byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trace = tmp_path / "trace"
    (tmp_path / "code.py").write_text(f"open({str(trace)!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no tokenizer.json, nor one that transformers reads"):
        Tokenizer.load(tmp_path)
    assert not trace.exists()


def test_without_tokenizer_json_transformers_reads_the_checkpoint(tmp_path: Path) -> None:
    """GPT-2's older files: vocab.json and merges.txt."""
    pytest.importorskip("transformers")
    trained = train_byte_level()
    model = json.loads(trained.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hello the cat") == trained.encode("hello the cat").ids
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize("train", [train_byte_level, train_byte_fallback, train_metaspace])
def test_it_encodes_and_decodes_as_transformers_does(tmp_path: Path, train) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save(tmp_path, with_bos(train()), {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in ["", "hello world", "  two spaces", "<|im_start|>the cat<|im_end|>\n"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
