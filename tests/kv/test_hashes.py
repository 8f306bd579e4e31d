"""Hashes name a block by everything before it."""

from __future__ import annotations

from pellucid.kv.hashes import Prefix, root_digest


def digests_of(tokens: list[int], root: bytes = b"") -> list[bytes]:
    prefix = Prefix(root, 4)
    prefix.extend(tokens)
    return prefix.digests


def test_only_full_blocks_have_a_name() -> None:
    assert [len(digests_of(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_equal_prefixes_have_equal_names_and_a_changed_token_renames_all_behind_it() -> None:
    one, other = digests_of(list(range(12))), digests_of([0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11])
    assert one[0] == other[0]
    assert one[1] != other[1] and one[2] != other[2]


def test_extending_step_by_step_gives_the_same_names_as_all_at_once() -> None:
    tokens, prefix = list(range(23)), Prefix(b"", 4)
    for end in range(24):
        prefix.extend(tokens[:end])
    assert prefix.digests == digests_of(tokens)


def test_what_was_hashed_is_not_read_again() -> None:
    tokens, prefix = list(range(12)), Prefix(b"", 4)
    prefix.extend(tokens[:8])
    prefix.extend([99, *tokens[1:]])  # which would rename everything
    assert prefix.digests == digests_of(tokens)


def test_lora_and_salt_keep_prefixes_apart() -> None:
    roots = [root_digest(), root_digest(lora="a"), root_digest(cache_salt="a"), root_digest("a", "a")]
    assert len({digests_of([1, 2, 3, 4], root)[0] for root in roots}) == len(roots)


def test_tokens_do_not_run_into_each_other() -> None:
    """256 is not the bytes of 0 and 1."""
    assert digests_of([256, 0, 0, 0]) != digests_of([0, 1, 0, 0])
