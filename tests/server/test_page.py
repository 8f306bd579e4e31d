"""The page at /, in a real browser on a real server; with PELLUCID_SHOTS=FOLDER it leaves pictures there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import httpx

from tests.server.chromium import Tab
from tests.server.conftest import Running, running

SHOTS = "PELLUCID_SHOTS"
BUSY = "document.querySelector('#composer').classList.contains('busy')"
NUM_COLOURFUL = """(() => {
    const canvas = document.querySelector('%s');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let num = 0;
    for (let i = 0; i < data.length; i += 4) {
        const rgb = data.slice(i, i + 3);
        num += data[i + 3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 60;
    }
    return num;
})()"""  # how many pixels have a strong colour

CUT_OFF = """(() => {
    document.querySelector('#usage-more').textContent = '123,456 pages of 128 tokens';
    const padding = (tile) => parseFloat(getComputedStyle(tile).paddingRight);
    const inner = (tile) => tile.getBoundingClientRect().right - padding(tile);
    const ends = (text) => {
        const range = document.createRange();
        range.selectNodeContents(text);
        return range.getBoundingClientRect().right;
    };
    return [...document.querySelectorAll('.tile:not([hidden]) small')]
        .filter((text) => ends(text) > inner(text.closest('.tile')))
        .map((text) => text.textContent);
})()"""  # what runs over the edge of a tile, on a machine with much memory


def shoot(tab: Tab, name: str) -> None:
    folder = os.environ.get(SHOTS)
    if folder:
        tab.shot(Path(folder) / f"{name}.png")


def colourful(selector: str) -> str:
    return NUM_COLOURFUL % selector


def say(tab: Tab, text: str) -> None:
    tab.type("#draft", text)
    tab.until(f"!({BUSY})")


def test_its_files_need_nobody_else(server: Running) -> None:
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("main.js", "style.css", "icon.svg"):
        part = httpx.get(f"{server.url}/page/{name}")
        assert part.status_code == 200 and part.headers["content-type"].split(";")[0] in (
            "text/javascript",
            "text/css",
            "image/svg+xml",
        )
    for name in ("nothing.js", "..%2fpages.py", "%2e%2e/pages.py"):
        assert httpx.get(f"{server.url}/page/{name}").status_code == 404
    sources = Path(__file__).parents[2] / "pellucid" / "server" / "page"
    named = [line for path in sources.iterdir() for line in path.read_text().splitlines() if "://" in line]
    assert all("www.w3.org" in line for line in named), "no address of another host"


def test_the_routes_are_described_field_by_field(tab: Tab, server: Running) -> None:
    tab.open(f"{server.url}/docs")
    tab.until("document.querySelectorAll('details').length > 10")
    assert tab.text("h1").startswith("Pellucid")
    tab.click("details:nth-of-type(2) summary")
    assert "/v1/chat/completions" in tab.text("details:nth-of-type(2)")
    assert "max_completion_tokens" in tab.text("details:nth-of-type(2) table")
    assert "include_usage" in tab.text("details:nth-of-type(2) table:last-of-type")
    shoot(tab, "docs")
    assert tab.errors == []


def test_a_view_has_an_address(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    for hash, view in (("xray", "xray"), ("", "chat")):
        tab.eval(f"location.hash = '{hash}'")
        tab.until(f"!document.querySelector('#{view}').hidden")
    assert tab.errors == []


def test_routes_that_do_not_come_are_told_of(tab: Tab, server: Running) -> None:
    broken = "window.fetch = async () => { throw new TypeError('Failed to fetch'); }"
    script = tab.call("Page.addScriptToEvaluateOnNewDocument", source=broken)["identifier"]
    try:
        tab.open(f"{server.url}/docs")
        tab.until("document.querySelector('main p').textContent !== ''")
    finally:
        tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert "has not come: Failed to fetch" in tab.text("main p") and tab.errors == []


def test_a_chat_streams_its_answer_and_folds_its_thoughts(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.until("document.querySelector('#model').textContent === 'sprout'")
    shoot(tab, "welcome")
    tab.eval("document.querySelector('#temperature').value = 0")
    tab.eval("document.querySelector('#temperature').dispatchEvent(new Event('input'))")
    assert tab.text("label[for=temperature] output") == "0.00"
    tab.type("#draft", "What is 47 + 85?")
    tab.until("document.querySelector('.thinking.busy') !== null")
    early = len(tab.text(".thoughts"))
    tab.until(f"!({BUSY})")
    assert len(tab.text(".thoughts")) > early, "it has grown while it was looked at"
    assert tab.text(".assistant .text") == "132"
    assert not tab.eval("document.querySelector('.thinking').open")
    assert "tokens/s" in tab.text(".facts") and "first after" in tab.text(".facts")
    say(tab, "Sort in ascending order: 930, 425, 341, 84, 278")
    assert tab.eval("document.querySelectorAll('.message').length") == 4
    assert "written" in tab.text("#totals")
    shoot(tab, "chat")
    assert tab.errors == []


def test_light_and_dark_are_the_systems_until_one_is_chosen(tab: Tab, server: Running) -> None:
    def prefer(theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        tab.call("Emulation.setEmulatedMedia", features=[feature])

    tab.open_anew(server.url)
    for theme in ("dark", "light"):
        prefer(theme)
        tab.until(f"document.documentElement.dataset.theme === '{theme}'")
    tab.click("#theme")
    tab.reload()
    prefer("light")
    assert tab.eval("document.documentElement.dataset.theme") == "dark", "as chosen"
    tab.call("Emulation.setEmulatedMedia", features=[])
    assert tab.errors == []


def test_an_answer_can_be_stopped_and_a_chat_begun_anew(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.type("#draft", "Sort in ascending order: " + ", ".join(str(n * 37 % 1000) for n in range(60)))
    tab.until("document.querySelector('.thinking.busy') !== null")
    tab.click("#send")
    tab.until(f"!({BUSY})")
    assert "stopped" in tab.text(".facts")
    server.wait_until_idle()
    tab.click("#new-chat")
    assert tab.eval("document.querySelectorAll('.message').length") == 0
    assert tab.eval("!document.querySelector('#welcome').hidden")


def test_what_goes_wrong_is_said_in_the_servers_words(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.eval("document.querySelector('#max_tokens').value = -5")
    say(tab, "Hello")
    assert "max_tokens is -5" in tab.text(".error")
    assert any("400" in error for error in tab.errors), "the browser's own note of it"
    tab.errors.clear()
    tab.eval("document.querySelector('#max_tokens').value = 1")
    tab.click(".retry")
    tab.until(f"!({BUSY})")
    assert tab.text(".error") == "" and tab.eval("document.querySelectorAll('.message').length") == 2
    assert (
        tab.text(".empty-answer")
        == "No text within all it may have, 1 token. Allow more under “Max tokens per answer”."
    )
    assert tab.errors == []


KEPT = "JSON.parse(localStorage.getItem('conversations') ?? '[]')"


def test_a_chat_outlives_a_reload_and_can_be_edited_and_asked_again(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.eval("sessionStorage.setItem('pellucid-key', 'my-own-key')")
    tab.eval("document.querySelector('#temperature').value = 0")
    say(tab, "What is 47 + 85?")
    before = tab.text(".assistant")
    assert "132" in before and "Thought for" in before
    tab.reload()
    assert tab.eval("document.querySelectorAll('.message').length") == 2
    assert tab.text(".assistant") == before, "thoughts and figures, too"
    assert "my-own-key" not in tab.eval("JSON.stringify(localStorage)")

    tab.click(".retry")
    tab.until(f"{BUSY}")
    tab.until(f"!({BUSY})")
    assert tab.eval("document.querySelectorAll('.message').length") == 2
    tab.click(".user .act")
    tab.eval("document.querySelector('.editor textarea').value = 'What is 4 + 5?'")
    tab.click(".editor [type=submit]")
    tab.until(f"!({BUSY})")
    assert tab.text(".user .text") == "What is 4 + 5?" and tab.text(".assistant .text") == "9"
    assert [turn["role"] for turn in tab.eval(KEPT)[0]["turns"]] == ["user", "assistant"]

    tab.click("#new-chat")
    say(tab, "What is 2 + 2?")
    assert tab.eval(f"{KEPT}.map(chat => chat.turns[0].content)") == ["What is 2 + 2?", "What is 4 + 5?"]
    tab.click("#chats li:nth-child(2) .chat-title")
    assert tab.text(".user .text") == "What is 4 + 5?"
    tab.click("#forget-chats")
    assert tab.text("#forget-chats") == "Forget all 2 chats?" and len(tab.eval(KEPT)) == 2
    tab.click("#forget-chats")
    assert tab.eval(KEPT) == [] and tab.eval("document.querySelectorAll('.message').length") == 0
    tab.reload()
    assert tab.eval("!document.querySelector('#welcome').hidden")
    assert tab.eval(KEPT) == [] and tab.errors == []


def test_what_of_an_answer_has_come_is_kept_when_the_page_is_left(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.type("#draft", "Sort in ascending order: " + ", ".join(str(n * 37 % 1000) for n in range(60)))
    tab.until("document.querySelector('.thoughts').textContent.length > 20")
    tab.reload()
    assert tab.eval("document.querySelectorAll('.message').length") == 2
    assert len(tab.text(".thoughts")) > 20
    assert "the page was left" in tab.text(".facts") and "the page was left" in tab.text(".empty-answer")
    server.wait_until_idle()


HAS_RATE = "Number(document.querySelector('#rate').textContent.replace(',', '')) > 0"
RATES = """(() => {
    window.rates = [];
    const shown = document.querySelector('#rate');
    new MutationObserver(() => rates.push(shown.textContent)).observe(shown, {childList: true});
})()"""  # all that are shown
IS_CUT = "/^\\d+ more: /.test(document.querySelector('#requests-rest').textContent)"
IS_FULL = """document.querySelectorAll('.request:not(.waits)').length === 8
    && document.querySelectorAll('.request.waits').length > 0"""


def test_a_rate_is_shown_once_there_is_one(tab: Tab, server: Running) -> None:
    """That none is shown before is tested with a clock of its own, `test_every_figure_names_...`."""

    def load() -> None:
        with server.client() as client:
            while not is_over.is_set():
                client.completions.create(
                    model="sprout", prompt="Once", max_tokens=100, extra_body={"ignore_eos": True}
                )

    tab.open_anew(server.url)
    assert tab.text("#rate") == "–"
    tab.eval(RATES)
    is_over = threading.Event()
    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(2):
            tab.eval("rates.length = 0")
            tab.click("#tab-xray")
            tab.until(f"rates.length > 0 && {HAS_RATE}")
            tab.click("#tab-chat")
            time.sleep(1.2)  # as long as silence takes
    finally:
        is_over.set()
        thread.join()
    tab.click("#tab-xray")
    tab.until("rates.at(-1) === '0'")
    assert tab.errors == []


def test_the_xray_shows_the_engine_at_work(tab: Tab) -> None:
    drafts = ("--speculative-model", "sprout-draft", "--num-speculative-tokens", "4")
    with running(*drafts, "--block-size", "16", "--max-num-seqs", "8") as server:
        tab.open(server.url)
        assert tab.text("#link") == "off"
        tab.click("#tab-xray")
        tab.until("document.querySelector('#link').dataset.state === 'live'")
        assert tab.eval(colourful("#pages")) == 0, "all is free"
        for width in (1360, 1000, 390):
            tab.size(width, 860)
            assert tab.eval(CUT_OFF) == []
        tab.size(1360, 860)
        tab.eval(RATES)
        tab.click("#load")
        with server.held(lambda: tab.eval(IS_CUT)):
            tab.click("#requests-rest")
        with server.held(lambda: tab.eval(IS_FULL)):
            tab.until(f"{colourful('#pages')} > 300 && {colourful('#steps')} > 300")
        tab.until("rates.some((rate) => Number(rate.replace(',', '')) > 0)")
        tab.until("document.querySelector('#accepted').textContent.endsWith('%')")
        if os.environ.get(SHOTS):
            tab.until("document.querySelectorAll('.request').length <= 9")  # the strip has filled
        shoot(tab, "xray")
        tab.click("#theme")
        time.sleep(0.3)
        shoot(tab, "xray-dark")
        tab.click("#theme")
        tab.until("!document.querySelector('#load').disabled")
        tab.until("document.querySelectorAll('.request').length === 0")
        tab.until("document.querySelector('#usage').textContent === '0%'")
        tab.click("#tab-chat")
        assert tab.text("#link") == "off"
        assert tab.errors == []
