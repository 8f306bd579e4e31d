"""Whether a grammar can be used is told in time, whatever it does to the process that tries."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("xgrammar")

from pellucid.sample.grammars import check
from pellucid.sample.grammars.base import GrammarSpec, Spelling
from pellucid.sample.grammars.check import GrammarChecker

SPELLING = Spelling(token_bytes=[bytes([i]) for i in range(128)], vocab_size=130, stop_token_ids=(0,))
ENDLESS = GrammarSpec("regex", "|".join(f"{i * 7919:08d}" for i in range(100_000)))
PROPERTIES = ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(20_000))
WIDE = GrammarSpec("json", f'{{"type":"object","properties":{{{PROPERTIES}}}}}')


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    checker = GrammarChecker(lambda: SPELLING)
    checker.check(GrammarSpec("regex", "a+"), 5.0)  # the process has started
    return checker


@pytest.mark.parametrize("spec", [ENDLESS, WIDE], ids=["regex", "schema"])
def test_what_takes_too_long_is_refused_in_time_and_then_at_once(
    checker: GrammarChecker, spec: GrammarSpec
) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="takes more than 0.5 s to compile; make it simpler"):
        checker.check(spec, 0.5)
    assert time.monotonic() - began < 20  # another process may have to start
    began = time.monotonic()
    with pytest.raises(ValueError, match="takes more than"):
        checker.check(spec, 0.5)
    assert time.monotonic() - began < 0.5
    checker.check(GrammarSpec("regex", "b+"), 5.0)  # others are none the worse for it


def test_a_grammar_that_its_process_dies_of_is_refused(checker: GrammarChecker) -> None:
    checker.check(GrammarSpec("regex", "c+"), 5.0)
    assert checker._process is not None
    timer = threading.Timer(0.3, checker._process.kill)
    timer.start()
    with pytest.raises(ValueError, match="cannot be compiled: it takes too much memory"):
        checker.check(GrammarSpec("regex", ENDLESS.text + "|x"), 60.0)


def test_a_process_that_has_died_for_itself_is_replaced(checker: GrammarChecker) -> None:
    checker.check(GrammarSpec("regex", "d+"), 5.0)
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    checker.check(GrammarSpec("regex", "e+"), 5.0)


def test_thinking_changes_nothing_of_what_is_compiled(checker: GrammarChecker) -> None:
    process, known = checker._process, set(checker._verdicts)
    checker.check(GrammarSpec("regex", "a+", (None, 5)), 5.0)
    assert checker._process is process and checker._verdicts.keys() == known


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs xgrammar; pip install 'pellucid\[serve\]'"):
        GrammarChecker(lambda: SPELLING).check(GrammarSpec("regex", "a+"), 1.0)
