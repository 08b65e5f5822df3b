"""A headless Chromium for tests, where there is one."""

import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; as root, tests/browser.sh installs it")

# [contrast with what lies behind, place] of each element of a selection that is seen and has text of its own (WCAG 2).
CONTRASTS = """(selector) => {
    const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (parts) => {
        const [r, g, b] = parts.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (part) => {
        if (!part) return [255, 255, 255];
        const [r, g, b, share = 1] = rgb(getComputedStyle(part).backgroundColor);
        if (share === 1) return [r, g, b];
        return behind(part.parentElement).map((below, i) => below + share * ([r, g, b][i] - below));
    };
    const own = (part) => [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const parts = [...document.querySelectorAll(selector)].filter((part) => own(part) && part.checkVisibility());
    return parts.map((part) => {
        const pair = [light(rgb(getComputedStyle(part).color).slice(0, 3)), light(behind(part))];
        return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), part.outerHTML.slice(0, 80)];
    });
}"""


class Browser:
    """One page of a headless Chromium over the DevTools protocol; requests to other sites get an empty answer."""

    def __init__(self, profile: Path, site: str):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.site, self.errors, self.outside, self.loaded, self.sent = site, [], set(), False, 0
        try:
            address = self._wait_for(profile / "DevToolsActivePort").split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{address}/json/list") as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=300, suppress_origin=True)
            for domain in ("Page", "Runtime", "Log", "Fetch"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _wait_for(path: Path, seconds: float = 60) -> str:
        end = time.monotonic() + seconds
        while not (path.exists() and path.read_text().count("\n")):
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.1)
        return path.read_text()

    def _send(self, method: str, **parameters) -> int:
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        return self.sent

    def call(self, method: str, **parameters) -> dict:
        """Send a command, and take events until its answer comes."""
        number = self._send(method, **parameters)
        while (message := json.loads(self.socket.recv())).get("id") != number:
            self._take(message)
        assert "error" not in message, (method, message)
        return message["result"]

    def _take(self, message: dict) -> None:
        values = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(values["exceptionDetails"].get("exception", values["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if values["type"] == "error":
                self.errors.append([part.get("value", part.get("description")) for part in values["args"]])
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append((values["entry"]["text"], values["entry"].get("url")))
            case "Fetch.requestPaused":
                url = values["request"]["url"]
                if url.startswith((self.site, "data:", "blob:")) and not url.endswith("/favicon.ico"):
                    self._send("Fetch.continueRequest", requestId=values["requestId"])
                else:
                    if not url.startswith(self.site):
                        self.outside.add(url)
                    self._send(
                        "Fetch.fulfillRequest",
                        requestId=values["requestId"],
                        responseCode=200,
                        body="",
                        responseHeaders=[{"name": "Access-Control-Allow-Origin", "value": "*"}],
                    )

    def open(self, address: str) -> None:
        """Load a page and everything on it."""
        self.errors, self.loaded = [], False
        self.call("Page.navigate", url=self.site + address)
        while not self.loaded:
            self._take(json.loads(self.socket.recv()))
        self.run("""Promise.all([...document.images].map(image => { image.loading = 'eager';
            return image.decode().catch(() => null); })).then(() => document.fonts.ready).then(() => true)""")

    def run(self, script: str):
        """Value of an expression on the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> bool:
        """Whether an expression becomes true on the page within so many seconds."""
        end = time.monotonic() + seconds
        while not (found := self.run(condition)) and time.monotonic() < end:
            time.sleep(0.1)
        return bool(found)

    def faint(self, selector: str, least: int) -> list[list]:
        """[contrast, place] of the text of elements below 4.5 (WCAG 2, level AA); there are at least so many."""
        found = self.run(f"({CONTRASTS})({json.dumps(selector)})")
        assert len(found) >= least, (selector, len(found))
        return [pair for pair in found if pair[0] < 4.5]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
