"""The study file, the generated pages, and the built book: as files, and as a reader's browser shows it."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import websocket
from bs4 import BeautifulSoup

from eelib.book import pages as book
from eelib.book.study_file import StudyFile

ROOT = Path(__file__).parents[2]
HTML = ROOT / "book/_build/html"
ALLOWED = ("https://cdn.jsdelivr.net/npm/mathjax@",)  # what Jupyter Book itself loads from elsewhere
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; as root, tests/browser.sh installs it")


# The study file and the fragments


def write_study(folder: Path, text: str) -> Path:
    path = folder / "study.yml"
    path.write_text(text, encoding="utf-8")
    return path


def test_parameters_of_a_notebook_win_over_those_of_its_model_and_these_over_the_shared(tmp_path):
    study = StudyFile.load(
        write_study(
            tmp_path,
            """
        parameters: {limit: 1, tasks: a, dtype: float32}
        notebooks: {length: {limit: 3}}
        models: {some/model: {parameters: {limit: 2, tasks: b}}, off: {enabled: false}}""",
        )
    )
    assert list(study.models) == ["model"]
    assert study.parameters("model", "length") == {
        "model": "some/model",
        "limit": 3,
        "tasks": "b",
        "dtype": "float32",
        "runs_folder": "runs",
        "results_folder": "results",
    }
    assert {"file": "results/model/length"} in study.contents()["parts"][1]["chapters"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("models: {a: {}}\nnotebooks: {n: {}}\nparameter: {}", "parameter"),
        ("models: {a: {memory: 3}}\nnotebooks: {n: {}}", "memory"),
        ("models: {a/m: {}, b/m: {}}\nnotebooks: {n: {}}", "results/m"),
        ("models: {a: {enabled: false}}\nnotebooks: {n: {}}", "no model"),
        ("models: {a: {notebooks: [m]}}\nnotebooks: {n: {}}", r"model a: notebooks is \['m'\]; allowed is .* n$"),
        ("models: {a: {notebooks: n}}\nnotebooks: {n: {}}", "model a: notebooks is 'n'"),
        ("models: {a: {notebooks: []}}\nnotebooks: {n: {}}", "model a: notebooks"),
        ("models: {a/..: {}}\nnotebooks: {n: {}}", r"model 'a/..': the last part of its name, '..' is not allowed"),
        ("models: {a: {}}\nnotebooks: {../n: {}}", r"notebook '\.\./n' is not allowed"),
    ],
)
def test_a_wrong_study_is_refused_by_name(tmp_path, text, named):
    with pytest.raises(ValueError, match=named):
        StudyFile.load(write_study(tmp_path, text))


def test_a_model_runs_the_notebooks_that_it_names_or_all(tmp_path):
    study = StudyFile.load(
        write_study(
            tmp_path,
            """
        notebooks: {length: {}, architectures: {}}
        models: {some/model: {}, other/classifier: {notebooks: [architectures]}}""",
        )
    )
    assert study.runs == [("model", "length"), ("model", "architectures"), ("classifier", "architectures")]
    chapters = [part["chapters"] for part in study.contents()["parts"]]
    assert chapters[2] == [{"file": "results/classifier/architectures"}]


def test_a_page_depends_on_the_weights_of_every_shipped_model_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EELIB_DATA", "data")
    for name in ("main", "beside", "beside-2", "other"):
        Path(f"data/models/{name}").mkdir(parents=True)
        Path(f"data/models/{name}/model.safetensors").write_text(name, encoding="utf-8")
    Path("notebooks").mkdir()
    Path("notebooks/n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "x = 'beside on a'"}]}))
    study = StudyFile.load(write_study(tmp_path, "notebooks: {n: {after: other}, m: {}}\nmodels: {main: {}}"))
    weights = {Path(file).parent.name for file in study.notebook_sources("main", "n") if "models" in file}
    assert weights == {"main", "beside", "other"}


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.61234, "0.612"),
        (12345, "12,345"),
        (None, "–"),
        (True, "yes"),
        ([1, "a"], "1, a"),
        ("a|b\n*c* $d$", r"a\|b \*c\* \$d\$"),
        ("see https://example.org/a_b.", "see <https://example.org/a_b>."),
    ],
)
def test_values_become_one_line_of_markdown(value, expected):
    assert book.text(value) == expected


def test_cards_keep_every_value():
    quality = {"a": {"BLEU": 1.5}, "b": {"BLEU": 2.5, "items": 9}}
    card = {"steps": 7, "quality": quality, "loss": [[i, 3 / (i + 1)] for i in range(10)]}
    page = "\n".join(book.card_parts(card))
    assert "|  | BLEU | items |" in page and "| b | 2.5 | 9 |" in page and "| a | 1.5 | – |" in page
    assert "| steps | 7 |" in page and "from 3 to 0.3, over 0 to 9" in page


# The built book


@pytest.fixture(scope="module")
def pages() -> dict[Path, BeautifulSoup]:
    """Every page, by path; builds the book, or does nothing where it is up to date."""
    done = subprocess.run(
        ["make", "book", f"VENV={sys.prefix}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")
        for path in sorted(HTML.rglob("*.html"))
        if "_static" not in path.parts
    }


def slow(test):
    """The first of these builds the book, which can take as long as the study does."""
    return pytest.mark.slow(pytest.mark.timeout(3600)(test))


@slow
def test_a_second_build_does_nothing_and_says_so(pages):
    done = subprocess.run(["make", "book", f"VENV={sys.prefix}"], cwd=ROOT, text=True, capture_output=True, check=True)
    assert "Nothing has changed" in done.stdout


@slow
def test_every_page_of_the_study_is_in_the_book(pages):
    study = StudyFile.load(ROOT / "study.yml")
    wanted = {HTML / "results" / model / f"{notebook}.html" for model, notebook in study.runs}
    assert wanted <= set(pages)


@slow
def test_every_image_has_alternative_text(pages):
    missing = [
        (path.name, str(image)[:150])
        for path, page in pages.items()
        for image in page.select("article img")
        if not image.get("alt", "").strip() or image["alt"].endswith((".png", ".svg"))
    ]
    assert not missing


@slow
def test_no_role_or_traceback_is_left_in_the_text(pages):
    marks = ("{glue", "{cite", "{include", "Traceback (most recent call last)")
    left = [
        (path.name, mark)
        for path, page in pages.items()
        for mark in marks
        if page.article and mark in page.article.get_text()
    ]
    assert not left


@slow
def test_nothing_loads_from_another_site(pages):
    loads = {
        tag.get("src") or tag.get("href")
        for page in pages.values()
        for tag in page.select("script[src], img[src], iframe[src], link[href]:not([rel=canonical])")
    }
    assert not {address for address in loads if "//" in address and not address.startswith(("data:", *ALLOWED))}


@slow
def test_internal_links_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in page.select("a[href]"):
            target, _, anchor = link["href"].partition("#")
            if ":" in target or target.startswith("//"):
                continue
            place = (path.parent / urllib.request.url2pathname(target)).resolve() if target else path
            known = pages.get(place)
            if not place.exists() or (anchor and known and not known.find(id=anchor)):
                broken.append((path.name, link["href"]))
    assert not broken


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
            self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
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

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser(pages, tmp_path_factory):
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=HTML))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    window = Browser(tmp_path_factory.mktemp("chromium"), f"http://127.0.0.1:{server.server_port}/")
    yield window
    window.close()
    server.shutdown()


def addresses(pages) -> list[str]:
    """Every page but the redirect at the root, which is gone before it can be looked at."""
    lasting = (path for path, page in pages.items() if not page.select("meta[http-equiv=Refresh]"))
    return [path.relative_to(HTML).as_posix() for path in lasting]


@slow
@needs_browser
def test_every_page_loads_without_an_error_or_a_broken_image(pages, browser):
    problems = {}
    for address in addresses(pages):
        browser.open(address)
        broken = browser.run("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
        if browser.errors or broken:
            problems[address] = browser.errors + broken
    assert not problems
    assert not {url for url in browser.outside if not url.startswith(ALLOWED)}


@slow
@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(pages, browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=375, height=812, deviceScaleFactor=1, mobile=True)
    too_wide = {}
    for address in addresses(pages):
        browser.open(address)
        if browser.run("Math.max(document.documentElement.scrollWidth, window.innerWidth)") > 375:
            too_wide[address] = browser.run("""[...document.querySelectorAll('article *')].filter(
                part => part.getBoundingClientRect().right > 376 && !part.closest('table, pre, .cell_output')
            ).map(part => part.outerHTML.slice(0, 120)).slice(0, 5)""")
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert not too_wide


@slow
@needs_browser
def test_figures_stay_on_white_in_dark_mode(pages, browser):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    for address in addresses(pages):
        browser.open(address)
        if browser.run("document.querySelector('.bd-article img') !== null"):
            assert browser.run("document.documentElement.dataset.theme") == "dark"
            backgrounds = browser.run(
                "[...document.querySelectorAll('.bd-article img')].map("
                "image => getComputedStyle(image).backgroundColor)"
            )
            assert set(backgrounds) == {"rgb(255, 255, 255)"}, address
    browser.call("Emulation.setEmulatedMedia", features=[])
