"""A picture of the board in a real Grafana.

Starts what compose.yaml has, loads the server, asks what each panel asks, and takes the picture with a
Chromium; with --grafana, of a Grafana that already runs.  Ends with 1, and says why, if a rule or a query
of the board has an error or nothing to show.  Run it with the Python that Pellucid is installed in.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # tests/server/chromium.py, which drives a browser
BOARD = json.loads((HERE / "grafana" / "dashboards" / "pellucid.json").read_text())
DRAFTED = "sum(vllm:spec_decode_num_draft_tokens_total)"
REQUEST_SECONDS = 120.0  # that one request may take
ROW_PIXELS = 38  # of Grafana's grid


class Trouble(Exception):
    """What is wrong, and what to do about it."""


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then, too
    try:
        browser = find_browser(args.browser)
        if args.grafana:
            picture(args, browser)
        else:
            with composed(args):
                picture(args, browser)
    except Trouble as trouble:
        print(f"screenshot: {trouble}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("pellucid-board.png"), help="the picture (%(default)s)")
    add("--cpu", action="store_true", help="start the image for CPUs (compose.cpu.yaml)")
    add("--model", default="sprout", help="that the started server serves (%(default)s)")
    add(
        "--server",
        metavar="URL",
        help="a server that runs, to load instead of starting one; --grafana loads none without",
    )
    add("--api-key", metavar="KEY", help="that --server asks for")
    add("--grafana", metavar="URL", help="a Grafana that runs and has the board; starts nothing")
    add("--prometheus", metavar="URL", help="its Prometheus, to have the rules looked at, too")
    add("--token", help="of a service account of that Grafana, if it does not let everyone look")
    add("--seconds", type=float, default=60, metavar="N", help="of load; 0: none (%(default)s)")
    add("--wait", type=float, default=180, metavar="N", help="seconds that each thing may take (%(default)s)")
    add("--browser", metavar="FILE", help="a Chromium (the one on PATH)")
    args = parser.parse_args(arguments)
    if args.grafana and args.cpu:
        parser.error("--cpu is for a server that is started; --grafana starts none")
    if args.prometheus and not args.grafana:
        parser.error("--prometheus goes with --grafana; without, one is started")
    for name in ("server", "grafana", "prometheus"):
        if url := getattr(args, name):
            setattr(args, name, url.rstrip("/"))
    return args


def picture(args: argparse.Namespace, browser: str) -> None:
    """Load the server, look at what stands behind the board, and take its picture."""
    grafana = Grafana(args.grafana or "http://127.0.0.1:3000", args.token)
    prometheus = args.prometheus or (None if args.grafana else "http://127.0.0.1:9090")
    server = args.server or (None if args.grafana else "http://127.0.0.1:8000")
    grafana.wait_until_healthy(args.wait)
    began = time.time()
    if server and args.seconds:
        wait_for_server(server, args.wait)
        say(f"{args.seconds:g} seconds of load on {server}")
        load(server, args.api_key, args.seconds)
    if prometheus:
        check_rules(prometheus, args.wait)
    since = min(began, time.time() - 300)
    filled = grafana.check_panels(since, args.wait)
    shoot(grafana, browser, args.output, filled, args.wait)
    say(f"the picture is {args.output}")


# What compose.yaml starts


@contextmanager
def composed(args: argparse.Namespace) -> Generator[None, None, None]:
    """Start the services, and stop them."""
    check_docker()
    with tempfile.TemporaryDirectory(prefix="pellucid-board-") as folder:
        files = [HERE / "compose.yaml", *([HERE / "compose.cpu.yaml"] if args.cpu else [])]
        files.append(changes(Path(folder), args))
        command = ["docker", "compose", "--project-name", "pellucid-board"]
        command += [word for file in files for word in ("-f", str(file))]
        services = ["prometheus", "grafana"] if args.server else []
        try:
            say("starting what deploy/compose.yaml has; the first time, images are built and pulled")
            done = subprocess.run([*command, "up", "--detach", "--build", *services], check=False)
            if done.returncode:
                raise Trouble(
                    f"docker compose failed with {done.returncode}, see above.  Free the ports 8000, 9090, "
                    "3000 if one is taken, or name a Grafana that runs (--grafana); without a GPU, --cpu"
                )
            yield
        finally:
            say("stopping it")
            subprocess.run([*command, "down", "--timeout", "60"], check=False)


def check_docker() -> None:
    otherwise = "or give what runs already: --grafana URL --prometheus URL --server URL"
    if shutil.which("docker") is None:
        raise Trouble(
            f"docker is not installed: install Docker and Compose (docs.docker.com/engine), {otherwise}"
        )
    for words, missing in (
        (["compose", "version"], "docker has no compose: install Docker Compose 2.24.4 or newer"),
        (["info"], "docker's daemon does not answer: start it, be in the group docker"),
    ):
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or "nothing").splitlines()[-1]
            raise Trouble(f"{missing}, {otherwise} (docker says: {said})")


def changes(folder: Path, args: argparse.Namespace) -> Path:
    """What is different here from compose.yaml, as a file of Compose's (JSON is YAML)."""
    if not args.server:
        drafts = ["--speculative-method", "ngram", "--num-speculative-tokens", "3"]  # or a panel has nothing
        services: dict[str, Any] = {"pellucid": {"command": [args.model, *drafts]}}
    else:
        host = urllib.parse.urlsplit(args.server)
        name = (
            "host.docker.internal"
            if host.hostname in ("127.0.0.1", "localhost", "0.0.0.0")
            else host.hostname
        )
        config = (HERE / "prometheus.yml").read_text()
        (folder / "prometheus.yml").write_text(config.replace("pellucid:8000", f"{name}:{host.port or 80}"))
        services = {
            "prometheus": {
                "extra_hosts": ["host.docker.internal:host-gateway"],
                "volumes": [f"{folder}/prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
            }
        }
        for path in (folder, folder / "prometheus.yml"):
            path.chmod(0o755)  # Prometheus is another user there
    file = folder / "changes.yaml"
    file.write_text(json.dumps({"services": services}))
    return file


# Load


def wait_for_server(server: str, seconds: float) -> None:
    until(
        lambda: call(f"{server}/health")[0] == 200,
        seconds,
        f"{server}/health is not 200: has the server said that it is ready?  It may need longer: --wait",
    )


def load(server: str, key: str | None, seconds: float) -> None:
    """Requests of many kinds from one to six clients at a time.  Raises Trouble if none is answered."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, models = call(f"{server}/v1/models", headers=headers)
    if status != 200:
        raise Trouble(
            f"{server}/v1/models answers {status} ({short(models)}); a server with keys needs --api-key"
        )
    kinds = itertools.cycle(requests(json.loads(models)["data"][0]["id"]))
    end, answered, refused = time.monotonic() + seconds, [0], [""]
    lock = threading.Lock()

    def client(index: int) -> None:
        time.sleep(seconds * index / 8)  # each begins later than the one before
        while time.monotonic() < end:
            with lock:
                path, body = next(kinds)
            status, text = call(f"{server}{path}", body, headers, REQUEST_SECONDS)
            with lock:
                if status == 200:
                    answered[0] += 1
                elif status != 404:  # that one is asked for
                    refused[0] = f"{path} answers {status}: {short(text)}"

    clients = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(6)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(seconds + REQUEST_SECONDS)
    if not answered[0]:
        raise Trouble(f"{server} answered no request: {refused[0] or 'none came back'}")
    say(f"{answered[0]} requests answered" + (f"; {refused[0]}" if refused[0] else ""))


def requests(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body: short, long, of one prefix, streamed, whole, and for a model that is not there."""
    long = "You add numbers and say how. " * 12
    for i in range(24):
        question = [{"role": "user", "content": f"What is {i} + {7 * i}?"}]
        yield "/v1/chat/completions", {"model": model, "messages": question, "max_tokens": 30}
        shared = [{"role": "system", "content": long}, *question]
        yield "/v1/chat/completions", {"model": model, "messages": shared, "max_tokens": 60, "stream": True}
        text = "one two three one two three one two"
        yield "/v1/completions", {"model": model, "prompt": [text, f"{i} {text}"], "max_tokens": 20 + 8 * i}
        if i % 8 == 0:
            yield "/v1/completions", {"model": f"no-{model}", "prompt": text}


# What stands behind the board


def check_rules(prometheus: str, seconds: float) -> None:
    """Prometheus scrapes a server, and evaluates each rule of rules.yml without an error."""
    ours = [
        line.split(":", 1)[1].strip()
        for line in (HERE / "rules.yml").read_text().splitlines()
        if line.strip().startswith(("- record:", "- alert:"))
    ]
    said = [""]

    def scraped() -> bool:
        status, text = call(f"{prometheus}/api/v1/targets?state=active")
        if status != 200:
            said[0] = f"/api/v1/targets answers {status} {short(text)}"
            return False
        targets = [
            each for each in json.loads(text)["data"]["activeTargets"] if each["labels"]["job"] == "pellucid"
        ]
        said[0] = "; ".join(f"{each['scrapeUrl']}: {each['lastError'] or each['health']}" for each in targets)
        said[0] = said[0] or "no target with job pellucid"
        return any(each["health"] == "up" for each in targets)

    def evaluated() -> bool:
        status, text = call(f"{prometheus}/api/v1/rules")
        groups = json.loads(text)["data"]["groups"] if status == 200 else []
        rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
        if wrong := [
            f"{name}: {rule['lastError']}" for name, rule in rules.items() if rule["health"] == "err"
        ]:
            raise Trouble(f"{prometheus} cannot evaluate {'; '.join(wrong)}")
        unknown = [name for name in ours if rules.get(name, {}).get("health") != "ok"]
        said[0] = f"not loaded or not evaluated: {', '.join(unknown)}"
        return not unknown

    hint = "a server on this machine must listen to others, too: --host 0.0.0.0"
    until(scraped, seconds, lambda: f"{prometheus} scrapes no server ({said[0]}); {hint}")
    until(evaluated, seconds, lambda: f"{prometheus} lacks rules of deploy/rules.yml; {said[0]}")
    say(f"{prometheus} scrapes the server and evaluates {len(ours)} rules")


class Grafana:
    """What its HTTP API says."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def wait_until_healthy(self, seconds: float) -> None:
        def healthy() -> bool:
            status, text = call(f"{self.url}/api/health")
            return status == 200 and json.loads(text).get("database") == "ok"

        until(
            healthy,
            seconds,
            f"no healthy Grafana at {self.url}: {self.url}/api/health has no database that is ok",
        )

    def board(self) -> dict[str, Any]:
        """The board as Grafana has it."""
        status, text = call(f"{self.url}/api/dashboards/uid/{BOARD['uid']}", headers=self.headers)
        if status in (401, 403):
            raise Trouble(
                f"{self.url} lets nobody look without a login: give --token, of a service account (viewer)"
            )
        if status != 200:
            raise Trouble(
                f"{self.url} has no board `{BOARD['uid']}` (status {status}): "
                "import deploy/grafana/dashboards/pellucid.json"
            )
        board = json.loads(text)["dashboard"]
        if queries(board) != queries(BOARD):
            say("note: Grafana's board asks for other things than deploy/grafana/dashboards/pellucid.json")
        return board

    def ask(self, targets: list[dict[str, Any]], since: float) -> dict[str, dict[str, Any]]:
        """The result of each target, by refId."""
        shared = {"range": True, "intervalMs": 5000, "maxDataPoints": 500}
        body = {
            "queries": [{**target, **shared} for target in targets],
            "from": str(int(since * 1000)),
            "to": "now",
        }
        status, text = call(f"{self.url}/api/ds/query", body, self.headers)
        try:
            return json.loads(text)["results"]
        except (ValueError, KeyError, TypeError):
            what = {
                target["refId"]: {"error": f"/api/ds/query answers {status}: {short(text)}"}
                for target in targets
            }
            return what

    def check_panels(self, since: float, seconds: float) -> int:
        """Ask what each panel asks.  How many have something to show.  Raises Trouble if one should."""
        panels = [panel for panel in self.board()["panels"] if panel.get("targets")]
        wrong: list[str] = []

        def all_answered() -> bool:
            drafts = self.drafts(panels[0], since)
            wrong[:] = [fault for panel in panels for fault in self.faults(panel, since, drafts)]
            return not wrong

        until(all_answered, seconds, lambda: "the board is not whole:\n  " + "\n  ".join(wrong))
        empty = 0 if self.drafts(panels[0], since) else sum(map(is_of_drafts, panels))
        say(f"{len(panels)} panels have what they ask for")
        if empty:
            say("note: the server drafts nothing, so that panel is empty")
        return len(panels) - empty

    def drafts(self, panel: dict[str, Any], since: float) -> bool:
        """Does the server draft?"""
        target = {"refId": "A", "expr": DRAFTED, "datasource": source(panel, panel["targets"][0])}
        return any(numbers(self.ask([target], since).get("A", {})))

    def faults(self, panel: dict[str, Any], since: float, drafts: bool) -> Iterator[str]:
        """What is wrong with a panel's queries."""
        targets = [
            {
                "refId": target["refId"],
                "expr": target["expr"].replace(
                    "$model", ".*"
                ),  # the page's part; $__rate_interval is Grafana's
                "datasource": source(panel, target),
            }
            for target in panel["targets"]
        ]
        results = self.ask(targets, since)
        for target in targets:
            result = results.get(target["refId"], {"error": "no result"})
            if result.get("error"):
                yield f"{panel['title']}: {result['error']} (asked: {target['expr']})"
            elif not list(numbers(result)) and (drafts or not is_of_drafts({"targets": [target]})):
                yield f"{panel['title']}: no data (asked: {target['expr']})"


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def source(panel: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    return target.get("datasource") or panel["datasource"]


def is_of_drafts(panel: dict[str, Any]) -> bool:
    """Has this panel nothing to show of a server that does not draft?"""
    return all("spec_decode" in target["expr"] for target in panel["targets"])


def numbers(result: dict[str, Any]) -> Iterator[float]:
    """All values of all series; Grafana has null for one that is no number."""
    for frame in result.get("frames") or []:
        for column in frame["data"]["values"][1:]:
            yield from (value for value in column if value is not None)


# The picture


def find_browser(path: str | None) -> str:
    try:
        from tests.server.chromium import NAMES, find_chromium
    except ImportError as error:
        raise Trouble(
            f"{error}: run this with the Python that has Pellucid (make install; .venv/bin/python)"
        ) from error
    found = shutil.which(path) if path else find_chromium()
    if found is None:
        wanted = path or " or ".join(NAMES)
        raise Trouble(
            f"no browser: {wanted} is not here (apt-get install chromium), or say where with --browser"
        )
    return found


def shoot(grafana: Grafana, browser: str, output: Path, filled: int, seconds: float) -> None:
    """Take the picture.  filled: panels that have something to show, each of which draws on a canvas."""
    from tests.server.chromium import chromium

    height = 120 + ROW_PIXELS * max(
        panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in BOARD["panels"]
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with chromium(browser) as tab:
        tab.size(1600, height)  # what is out of sight, Grafana does not draw
        if grafana.headers:
            tab.call("Network.enable")
            tab.call("Network.setExtraHTTPHeaders", headers=grafana.headers)
        tab.call("Page.navigate", url=f"{grafana.url}/d/{BOARD['uid']}?kiosk&from=now-5m&to=now")
        try:
            tab.until(f"document.querySelectorAll('canvas').length >= {filled}", seconds)
            time.sleep(1)  # lines move while they appear
        except AssertionError as error:
            tab.shot(output)
            drawn = tab.eval("document.querySelectorAll('canvas').length")
            at = tab.eval("location.pathname")
            raise Trouble(
                f"{drawn} of {filled} panels are drawn in {output}: look at it, or raise --wait "
                f"(the browser is at {at}, and noted {tab.errors})"
            ) from error
        tab.shot(output)


# Small things


def call(
    url: str, body: object = None, headers: dict[str, str] | None = None, seconds: float = 30
) -> tuple[int, str]:
    """Status and text; status 0, and what happened, where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        return 0, str(error)


def until(condition: Callable[[], bool], seconds: float, otherwise: str | Callable[[], str]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            raise Trouble(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(1)


def short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + ".."


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
