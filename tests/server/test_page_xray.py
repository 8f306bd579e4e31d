"""What the X-ray says: nothing that it does not know, and of what is cut off, how much."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.observe.test_replay import record
from tests.server.chromium import Tab
from tests.server.conftest import Running, running

LIVE = "document.querySelector('#link').dataset.state === 'live'"
FIGURES = "[...document.querySelectorAll('.tile b, .legend b')].map(node => node.textContent)"
REMARKS = "[...document.querySelectorAll('.tile small')].map(node => node.textContent)"
UNKNOWN = f"{FIGURES}.every(text => text === '–') && {REMARKS}.every(text => text === 'not known')"
NOTICE = "document.querySelector('#notice').hidden ? '' : document.querySelector('#notice-text').textContent"
NUM_PAINTED = """(() => {
    const canvas = document.querySelector('%s');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return data.filter((value, index) => index %% 4 === 3 && value > 0).length;
})()"""
# How often the colours of two of the legend's swatches are in the picture.
IN_PICTURE = """['cached', 'free'].map((name) => {
    const pixels = (canvas, ...place) => {
        const {data} = canvas.getContext('2d').getImageData(...place);
        return new Uint32Array(data.buffer);
    };
    const [colour] = pixels(document.querySelector(`canvas.swatch[data-of=${name}]`), 5, 5, 1, 1);
    const picture = document.querySelector('#pages');
    return pixels(picture, 0, 0, picture.width, picture.height).filter((pixel) => pixel === colour).length;
})"""


def claims_nothing(tab: Tab) -> None:
    tab.until(UNKNOWN)
    assert "Not known." in tab.text("#requests") and tab.text("#page-tip") == "Not known."
    assert tab.text("#step-tip") == "Not known."
    tab.until(f"{NUM_PAINTED % '#pages'} === 0 && {NUM_PAINTED % '#steps'} === 0")


def test_without_a_link_nothing_is_claimed_and_the_reason_is_told(tab: Tab) -> None:
    with running("--api-key", "right") as server:
        tab.open_anew(server.url)
        tab.type("#draft", "Hello")
        tab.until("document.querySelector('.error') !== null")
        assert tab.text(".error") == "This server needs an API key. Enter the key"
        tab.click(".error .act")
        assert tab.eval("document.activeElement.id") == "key"
        tab.click("#tab-xray")
        tab.until(f"({NOTICE}) === 'This server needs an API key.'")
        claims_nothing(tab)
        for key, outcome in (
            ("wrong", f"({NOTICE}) === 'The server does not know this API key.'"),
            ("right", LIVE),
        ):
            tab.eval(f"document.querySelector('#xray-key').value = '{key}'")
            tab.click("#key-form button")
            tab.until(outcome)
        assert tab.eval(NOTICE) == "" and tab.text("#counts") == "0" and tab.text("#model") == "sprout"
        server.engine.kill()
        tab.until(f"({NOTICE}).startsWith('The engine has died: engine 0 has died (exit code -9).')")
        claims_nothing(tab)
        server.process.wait(20)
        tab.until(f"({NOTICE}).includes('The server does not answer.')")
        claims_nothing(tab)
    tab.call("Page.navigate", url="about:blank")
    tab.errors.clear()  # the browser's own notes of refusals


def test_what_is_cut_off_is_counted_and_the_load_can_be_stopped(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url, "#xray")
    tab.until(LIVE)
    prompts = ["Once"] * 40
    stream = server.client().completions.create(
        model="sprout", prompt=prompts, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    tab.until("document.querySelector('#counts').textContent === '16'")
    tab.until("document.querySelector('#counts-more').textContent === 'running now, 24 waiting'")
    num_shown = tab.eval("document.querySelectorAll('.request').length")
    assert 0 < num_shown < 16
    assert tab.text("#requests-rest") == f"{40 - num_shown} more: {16 - num_shown} running, 24 waiting"
    tab.click("#requests-rest")
    assert tab.eval("document.querySelectorAll('.request').length") == 40
    assert tab.text("#requests-rest") == "show fewer"
    tab.click("#load")
    tab.until("document.querySelector('#load').textContent === '16 under way'")
    tab.click("#stop-load")
    tab.until("document.querySelector('#load').textContent === 'Send 16 requests'")
    assert tab.text("#load-fault") == "" and tab.eval("document.querySelector('#stop-load').hidden")
    stream.close()
    server.wait_until_idle()
    assert tab.errors == []


def test_the_legend_is_the_pictures_and_counts_it(tab: Tab, server: Running) -> None:
    body = {"prompt": "Once upon a time " * 40, "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=100).status_code == 200
    server.wait_until_idle()
    tab.open_anew(server.url, "#xray")
    tab.until(LIVE)
    tab.until("Number(document.querySelector('#num-cached').textContent.replace(',', '')) > 0")
    for _ in range(2):
        tab.until(f"Math.min(...{IN_PICTURE}) > 100")
        tab.click("#theme")
    words = tab.text("#usage-more")
    cached = tab.text("#num-cached")
    numbers = [
        int(tab.text(f"#num-{name}").replace(",", "")) for name in ("owned", "shared", "cached", "free")
    ]
    assert words == f"now; {cached} of {sum(numbers):,} pages cached" and tab.text("#usage") == "0%"
    tab.eval("document.querySelector('#pages').focus()")
    press = {"key": "ArrowRight", "code": "ArrowRight"}
    tab.call("Input.dispatchKeyEvent", type="keyDown", **press)
    assert tab.text("#page-tip").startswith("page 1: "), "without a mouse, too"
    assert tab.errors == []


def test_every_figure_names_its_statistic_and_its_window(tab: Tab, server: Running) -> None:
    """The page's own functions, on what a server may say."""
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const {Record, figuresOf, time, median, roundUp} = await import('/page/figures.js');
        const {columnsFor, heightOf} = await import('/page/kv_pages.js');
        const {wordsOfRest} = await import('/page/requests.js');
        const {wordsOf} = await import('/page/steps.js');
        const stats = (n) => ({num_sampled_tokens: 100 * n, num_steps: n, host_seconds: 0.002 * n,
            wait_seconds: 0.008 * n, kv_usage: 0.25, num_cached_tokens: 30, num_prompt_tokens: 40,
            num_accepted_tokens: 9 * n, num_draft_tokens: 20 * n, num_drafts: 10 * n, num_preemptions: 3,
            num_accepted_per_position: [6 * n, 3 * n, 0], draft_seconds_saved: -0.1 * n, proposer: "mtp"});
        const frame = {num_running: 2, num_waiting: 0, num_pages: 100, steps: []};
        const record = new Record(), results = {unheard: figuresOf(record, 0, 0)};
        record.hear({waits: [[0.001, 0.2], [0.003, 0.4]], num_failed: 1,
            gaps: {num: 4, sum: 0.08, longest: 0.05}}, 1, 10);
        record.take(frame, stats(0), 10);
        const early = figuresOf(record, 5, 10.1);
        [results.early, results.undrafted] = [early.rate[0], early.accepted];
        record.take(frame, stats(10), 10.5);
        results.busy = figuresOf(record, 5, 10.5);
        const asleep = new Record();
        asleep.take({...frame, num_running: 0}, stats(0), 10);
        results.asleep = [asleep.rate(10.1), asleep.rate(10.3)];
        record.take(frame, stats(20), 12.5);
        results.late = [record.rate(12.5), record.rate(14), record.span(14), record.rate(18)];
        const rest = {...frame, num_running: 0};
        record.take(rest, stats(20), 12.6);
        record.take(frame, stats(30), 30);
        results.burst = record.rate(30);
        record.take(rest, stats(30), 30.1);
        results.silent = figuresOf(record, 5, 31.5);
        results.times = [0.00042, 0.0382, 0.3, 1.254, 12.34].map(time);
        results.median = [median([3, 1, 2]), median([4, 1, 2, 3])];
        results.ends = [4, 5, 16, 100, 101].map(roundUp);
        results.rests = [wordsOfRest(16, 111, 11), wordsOfRest(16, 111, 20), wordsOfRest(3, 0, 3)];
        const rows = [[7, 64, 0, 0], [8, 4, 3, 3]];
        results.step = wordsOf({id: 1234, numRows: 600, seconds: 0.0123, rows});
        results.fills = [40, 818, 1600, 15000, 60000].map((count) => {
            const columns = columnsFor(count, 760, 230);
            return heightOf(count, 760, columns);
        });
        return results;
    })()""")
    assert said["undrafted"] == ["–", "no drafts since start"]
    assert said["unheard"] is None and said["early"] == "–" and said["asleep"] == [None, 0]
    assert said["busy"] == {
        "rate": ["2,000", "in the last second · chart: 20\u00a0s"],
        "ttft": ["300 ms", "median of the last 2 requests"],
        "gap": ["20 ms", "mean of the last second · longest 50 ms"],
        "step": ["10 ms", "mean of the last second · host 2 ms, device 8 ms"],
        "counts": ["2", "running now, none waiting"],
        "queue": ["2 ms", "median of the last 2 requests"],
        "usage": ["25%", "now; 5 of 100 pages cached"],
        "hits": ["75%", "of 40 tokens since start"],
        "accepted": [
            "45%",
            "of 200 since start, by mtp · 2.00 a verification, by position 60% 30% · cost 1 s",
        ],
        "preemptions": ["3", "since start · 1 request failed"],
    }
    assert said["late"] == [500, 500, "the last 2 s", None], "an engine at work tells when it may"
    assert said["burst"] == 1000, "what came before the last second is not part of it"
    assert said["silent"]["rate"][0] == "0"
    assert said["silent"]["gap"] == ["–", "no stream in the last second"]
    assert said["silent"]["step"] == ["–", "no step in the last second"]
    assert said["times"] == ["0.42 ms", "38.2 ms", "300 ms", "1.25 s", "12.3 s"]
    assert said["median"] == [2, 2.5] and said["ends"] == [4, 6, 20, 100, 200]
    assert said["rests"] == ["116 more: 5 running, 111 waiting", "107 more: 107 waiting", None]
    assert said["step"] == (
        "step 1,234 · 12.3 ms · 600 rows · 68 tokens in in the first 2 · 3 out in the first 2"
        " · 2 of 3 drafts accepted"
    )
    assert said["fills"][0] < 115, "cells have a largest size"
    assert all(200 <= height <= 230 for height in said["fills"][1:4]), "else they fill their place"
    assert said["fills"][4] > 230, "and below a smallest size the picture scrolls"


def test_a_frame_that_was_under_way_when_the_link_began_is_passed_over(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const {XRay} = await import('/page/xray.js');
        const xray = new XRay();
        const stats = {num_sampled_tokens: 1, num_steps: 1, kv_usage: 0, num_preemptions: 0};
        const frame = {num_pages: 4, block_size: 16, num_running: 0, num_waiting: 0, running: [],
            waiting: [], steps: [], pages: [1, -1, 0, 1]};
        const requests = {waits: [], gaps: {num: 0}, num_failed: 0};
        const shown = (is_first) => {
            const sight = {engine: 0, num_engines: 1, requests, frame: {...frame, is_first},
                stats: {...stats, num_prompt_tokens: 0, num_draft_tokens: 0}};
            xray.take(sight);
            return document.querySelector('#num-cached').textContent;
        };
        return [shown(false), shown(true)];
    })()""")
    assert said == ["–", "1"] and tab.errors == []


def test_engines_adapters_and_tiers_are_shown_where_there_are_some(tab: Tab, server: Running) -> None:
    """The page's own view, on what a server of two engines with KV tiers and adapters says."""
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const {XRay} = await import('/page/xray.js');
        const xray = new XRay();
        const frame = {is_first: true, num_pages: 4, block_size: 16, num_running: 3, num_waiting: 1,
            running: [], waiting: [], steps: [], pages: []};
        const tiers = {kv_tiers_host_pages_now: 25, kv_tiers_host_room_now: 100, kv_tiers_lookups: 8,
            kv_tiers_host_blocks_loaded: 7, kv_tiers_host_blocks_saved: 30, kv_tiers_hits: 2};
        const disk = {kv_tiers_disk_pages_now: 1, kv_tiers_disk_room_now: 1000,
            kv_tiers_disk_blocks_loaded: 1};
        const show = (engine, of_features, adapters, kv_usage) => xray.take({engine, num_engines: 2, frame,
            requests: {waits: [], gaps: {num: 0}, num_failed: 0, adapters},
            stats: {num_sampled_tokens: 1, num_steps: 1, kv_usage, num_preemptions: 0, num_prompt_tokens: 0,
                num_draft_tokens: 0, num_running: 3, num_waiting: 1 - engine, of_features}});
        const text = (selector) => [...document.querySelectorAll(selector)].map((node) => node.textContent);
        const shown = () => { xray.tell(); return {
            tiles: text('.tile:not([hidden])').slice(10), engines: text('#engines button'),
            adapters: document.querySelector('#adapters').hidden ? null : text('#adapters li')}; };
        const before = shown();
        show(0, {...tiers, ...disk}, [['mine', 2, 10], ['other', 0, 0]], 0.25);
        const one = shown();
        show(1, {}, Array.from({length: 30}, (_, i) => [`a${i}`, 0, 0]), 0.5);
        const both = shown();
        xray.forget();
        return {before, one, both, after: shown()};
    })()""")
    assert said["before"] == {"tiles": [], "engines": [], "adapters": None}
    assert said["one"] == {
        "tiles": [
            "KV in host memory25%now; of 100 pages · 7 blocks loaded, 30 saved since start",
            "KV on disk0.1%now; of 1,000 pages · 1 block loaded, 0 saved since start",
            "Found in these tiers25%of 8 lookups since start",
        ],
        "engines": ["engine 0: 3 running, 1 waiting, KV 25%", "engine 1"],
        "adapters": ["mine: 2 under way, 10 ended", "other: 0 under way, 0 ended"],
    }
    assert said["both"]["engines"][1] == "engine 1: 3 running, KV 50%"
    assert len(said["both"]["adapters"]) == 25 and said["both"]["adapters"][-1] == "and 6 more"
    assert said["after"] == {"tiles": [], "engines": ["engine 0", "engine 1"], "adapters": None}
    assert tab.errors == []


def test_conversations_are_bounded_and_what_failed_is_not_read_again(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const chats = await import('/page/conversations.js');
        const {partsOf, whyEmpty} = await import('/page/answer.js');
        const room = new Map();
        const storage = {getItem: (key) => room.get(key), setItem: (key, value) => room.set(key, value)};
        const chat = (id, content) => ({id, at: 0, turns: [{role: 'user', content}]});
        const ids = () => chats.keptChats(storage).map(({id}) => id);
        for (let i = 0; i < 40; i++) chats.keep(storage, chat(`c${i}`, 'a'));
        const many = ids();
        const keepLong = (id, length) => chats.keep(storage, chat(id, 'b'.repeat(length)));
        const long = [keepLong('long', 600_000), keepLong('longer', 600_000), ids()];
        const tooLong = [keepLong('huge', chats.MOST_CHARACTERS), ids()];
        room.set('conversations', '{broken');
        const broken = ids();
        const full = {...storage, setItem: () => { throw new DOMException('full', 'QuotaExceededError'); }};
        const turns = [{role: 'user', content: 'a'}, {role: 'assistant', content: '', error: 'refused'},
            {role: 'user', content: 'b'}, {role: 'assistant', content: '', finish: 'stop'},
            {role: 'user', content: 'c'}];
        return {many, long, tooLong, broken, full: chats.keep(full, chat('c', 'a')),
            messages: chats.messagesOf(turns, ' be brief '),
            title: chats.titleOf(chat('t', 'one\\n two '.repeat(20))).length,
            thoughts: partsOf('<think>hm</think>yes', ''),
            why: ['stop', 'stopped', 'length', null].map((finish) => whyEmpty({finish, thoughts: 'hm'}))};
    })()""")
    assert said["many"] == [f"c{i}" for i in range(39, 9, -1)]
    left = ["longer", *said["many"][:28]]
    assert said["long"] == [True, True, left], "what no longer fits beside it has gone"
    assert said["tooLong"] == [False, left] and said["broken"] == [] and said["full"] is False
    assert [(each["role"], each["content"]) for each in said["messages"]] == [
        ("system", " be brief "), ("user", "b"), ("assistant", ""), ("user", "c"),
    ]  # fmt: skip
    assert said["title"] == 48 and said["thoughts"] == {"thoughts": "hm", "text": "yes", "isThinking": False}
    assert ["without a word" in said["why"][0], "Stopped" in said["why"][1]] == [True, True]
    assert ["thoughts took all" in said["why"][2], "the page was left" in said["why"][3]] == [True, True]
    assert tab.errors == []


def test_a_trace_is_played_in_place_of_an_engine(tab: Tab, server: Running, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record(path, num_requests=40)
    tab.open_anew(server.url, "#xray")
    tab.until(LIVE)
    num_pages = tab.text("#num-free")

    def choose(text: str) -> None:
        tab.eval(f"""(() => {{
            const files = new DataTransfer();
            files.items.add(new File([{json.dumps(text)}], "steps.jsonl"));
            const input = document.querySelector("#trace-file");
            input.files = files.files;
            input.dispatchEvent(new Event("change"));
        }})()""")

    choose("hello")
    tab.until("document.querySelector('#load-fault').textContent.includes('has no pictures')")
    assert tab.text("#link") == "live", "the engine is still watched"
    choose(path.read_text())
    tab.until("document.querySelector('#link').textContent === 'steps.jsonl, to its end'")
    assert tab.text("#num-free") != num_pages, "pages of another engine"
    assert tab.text("#open-trace") == "Back to the engine" and tab.text("#load-fault") == ""
    tab.click("#open-trace")
    tab.until("document.querySelector('#link').textContent === 'live'")
    tab.until(f"document.querySelector('#num-free').textContent === '{num_pages}'")
    assert tab.text("#open-trace") == "Open a trace" and tab.errors == []


def test_a_request_has_a_page_of_its_own(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url, "#xray")
    tab.until(LIVE)
    stream = server.client().completions.create(
        model="sprout", prompt="word " * 300, max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    )
    tab.until("document.querySelectorAll('.request').length === 1")
    tab.eval("document.querySelector('.request').focus()")
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
    tab.call("Input.dispatchKeyEvent", type="keyDown", **enter)
    tab.until("document.querySelector('#life').open")
    tab.until("document.querySelector('#life-name').textContent.endsWith(' runs')")
    tab.until(f"{NUM_PAINTED % '#life canvas'} > 500")
    words = tab.text("#life dl")
    assert "Prompt301 tokens" in words.replace("300 tokens", "301 tokens") and "Preemptednever" in words
    assert "First tokenafter " in words and "Betweentokens" in words.replace(" ", "").replace("–", "")
    assert tab.text("#life-chunks").startswith("Prompt chunks, in tokens: ")
    stream.close()
    server.wait_until_idle()
    tab.until("document.querySelector('#life-name').textContent.endsWith(' has ended')")
    assert "KVnone now" in tab.text("#life dl")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
    tab.until("!document.querySelector('#life').open")
    assert tab.errors == []


def test_a_life_in_words(tab: Tab, server: Running) -> None:
    """The page's own functions, on what a server may say."""
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const {Lives, factsOf, wordsOfChunks} = await import('/page/lives.js');
        const lives = new Lives();
        const seq = (numTokens, numComputed) => [7, '7', 100, numTokens, numComputed, 16, 200];
        const frame = (seconds, waiting, running, is_first = false) =>
            ({seconds, waiting, running, num_waiting: waiting.length, num_running: running.length,
              block_size: 16, is_first});
        const step = (id, seconds, ...row) => ({id, seconds, rows: [row], numRows: 1});
        lives.take(frame(10, [], [], true), []);
        lives.take(frame(11, [seq(100, 0)], []), []);
        lives.take(frame(12, [], [seq(100, 80)]), [step(1, 0.1, 7, 64, 0, 0)]);
        lives.take(frame(13, [], [seq(104, 103)]), [step(2, 0.2, 7, 20, 0, 1), step(3, 0.1, 7, 4, 3, 3)]);
        const facts = Object.fromEntries(factsOf(lives.lives.get(7), 13, 16));
        const chunks = wordsOfChunks(lives.lives.get(7));
        lives.take(frame(14, [seq(104, 0)], []), []);
        const preempted = factsOf(lives.lives.get(7), 14, 16).find(([name]) => name === 'Preempted')[1];
        lives.take(frame(15, [], []), []);
        return {facts, chunks, preempted, state: lives.lives.get(7).state};
    })()""")
    assert said["facts"] == {
        "Prompt": "100 tokens, 16 from the cache",
        "Answer": "4 tokens, at most 100",
        "In the queue": "1.9 s",
        "First token": "after 2.9 s",
        "Between tokens": "median 100 ms, longest 100 ms",
        "Steps": "3, with 2 prompt chunks",
        "Drafts": "2 of 3 accepted",
        "KV": "7 blocks",
        "Preempted": "never",
        "Seen for": "3 s",
    }
    assert said["chunks"] == "Prompt chunks, in tokens: 64 in step 1 (100 ms) · 20 in step 2 (200 ms)"
    assert said["preempted"] == "1 time" and said["state"] == "has ended"
