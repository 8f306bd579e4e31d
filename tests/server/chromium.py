"""A headless Chromium, driven by its DevTools protocol: just enough to use a page and to see it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

from tests.patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    # It speaks to the server alone.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._id = socket, 0
        self.errors: list[str] = []  # that the page raised or logged
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE))
            if message.get("id") == self._id:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !!document.documentElement.dataset.theme")

    def reload(self) -> None:
        self.eval("window.isOld = true")
        self.call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def open_anew(self, url: str, view: str = "") -> None:
        """As one who has never been here.  A page that is left may keep something: /docs does not."""
        self.open(f"{url}/docs")
        self.eval("localStorage.clear(), sessionStorage.clear()")
        self.open(f"{url}/{view}")

    def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.eval(expression):
            assert time.monotonic() < end, f"never true: {expression}; errors: {self.errors}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({selector!r}).click()")

    def type(self, selector: str, text: str) -> None:
        """Write into a field, and press Enter."""
        self.eval(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **enter)

    def text(self, selector: str) -> str:
        return self.eval(f"document.querySelector({selector!r})?.textContent ?? ''")

    def shot(self, path: Path) -> None:
        """A picture of what is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def chromium(path: str) -> Generator[Tab, None, None]:
    """Start a browser with one empty page, and end it."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [path, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            with connect(_address(Path(folder) / "DevToolsActivePort"), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _address(file: Path) -> str:
    """Where the page's own websocket is."""
    end = time.monotonic() + PATIENCE
    while not file.exists() or len(file.read_text().split()) < 2:
        assert time.monotonic() < end, "the browser does not start"
        time.sleep(0.05)
    port = file.read_text().split()[0]
    with urlopen(f"http://127.0.0.1:{port}/json") as reply:
        return next(tab["webSocketDebuggerUrl"] for tab in json.load(reply) if tab["type"] == "page")
