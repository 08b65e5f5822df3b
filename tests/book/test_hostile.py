"""A book whose every text means harm, as files and in a real browser: nothing runs, breaks out, or is fetched.

The texts are in a vocabulary, in prompts and in the names of tasks, which notebooks show; and in results, cards
and checks that somebody altered, which the generated pages show. Labels need no page:
those that are not their task's are refused.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import transformers as hf
import yaml
from chromium import Browser, needs_browser
from pages import papermill, program
from tokenizers import AddedToken

from checks.tiny import build
from checks.tiny_texts import tokenizer_for
from eestudy.book.study_file import StudyFile

ROOT = Path(__file__).parents[2]
HOSTILE = (  # each calls `canary` if it runs, or asks another site for something if it is markup
    "<img src=x onerror=canary(1)>",
    "<script>canary(2)</script>",
    "</script><script>canary(3)</script>",
    "\"><svg onload=canary(4)> ' onmouseover='canary(5)' x='",
    "[press](javascript:canary(6)) ![](https://elsewhere.example/a.png)",
    "<a href='javascript:canary(7)'>press</a> <https://elsewhere.example/\"onclick=canary(8)>",
    "$\\href{javascript:canary(9)}{press}$ \\(\\href{javascript:canary(10)}{press}\\) $$\\class{x}$$ $\\bad",
    "{glue:text}`note` {raw:html}`<img src=x onerror=canary(11)>` {{ note }} <!-- --> --> ]]>",
    "\n\n```{raw} html\n<img src=x onerror=canary(12)>\n```\n\n:::{raw} html\n<script>canary(13)</script>\n:::\n",
    "</td></tr></table></figure></details></article><iframe src='javascript:parent.canary(14)'></iframe>",
    "<style>@import url(https://elsewhere.example/a.css);</style><link rel=stylesheet href=//elsewhere.example>",
    "\u202eturned \u2066on \x1b[31m \x07\u2028 red\x00",
    "&lt;img src=x onerror=canary(15)&gt; &#60;script&#62;canary(16)&#60;/script&#62;",
    "| a | b |\n|---|---|\n# heading canary\n<http-equiv=refresh content='0;url=javascript:canary(17)'>",
)
FILE = "canary <img src=x onerror=canary(20)> $x$ `y` {glue}.de-en"  # what a file can be named
WATCH = "window.called = []; window.canary = (number) => window.called.push(number);"
FOUND = """(() => {
    const all = [...document.querySelectorAll('*')];
    const armed = (one) => [...one.attributes].some((a) => /canary/.test(a.value) && /^on|^src/.test(a.name));
    const article = document.querySelector('article') || document.body;  // the page of search has none
    const made = article.querySelectorAll(
        'iframe, object, embed, style, base, meta, article form, link:not([href$="lens/lens.css"])');
    return {
        called: window.called,
        links: [...document.links].map((a) => a.protocol).filter((p) => !/^(https?|file|mailto):$/.test(p)),
        armed: all.filter(armed).map((one) => one.outerHTML.slice(0, 200)),
        made: [...made].map((one) => one.outerHTML.slice(0, 200)),
        formulas: [...document.querySelectorAll('.math')].map((one) => one.textContent).filter((t) => /canary/.test(t)),
        turning: /[\\u202a-\\u202e\\u2066-\\u2069\\u0007\\u001b]/.test(article.textContent),
        outside: all.filter((one) => one.src && /elsewhere/.test(one.src)).length,
        shown: article.textContent.split('canary').length - 1,
    };
})()"""
TOUCH = """for (const one of document.querySelectorAll('article *')) {
    for (const kind of ['mouseover', 'focus', 'toggle']) one.dispatchEvent(new Event(kind, {bubbles: true}));
    if (one.matches('summary, button, input, td, th, .lens *')) one.click();
}"""
PAGE = "saturation"
FENCE = ":::{raw} html <script>canary(18)</script>"  # where a line begins
KEPT = {"id", "verdict", "way"}
SHOWING = (f"results/llama/{PAGE}", "intro", "scoreboard", "runs", "cards", "engine")
pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(1800)]


def save_model(folder: Path) -> str:
    """A tiny random model that says nothing but hostile texts, for the most part."""
    import torch

    made = tokenizer_for("causal")
    tokens = {f"{name}_token": getattr(made, f"{name}_token") for name in ("pad", "eos", "bos")}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **tokens)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in HOSTILE])
    network = build("causal", "llama")
    network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        head = network.get_output_embeddings().weight
        head[-len(HOSTILE) :] = 3 * torch.randn(len(HOSTILE), head.shape[1], generator=torch.manual_seed(1))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tampered(value, key: str = ""):
    """Results with hostile text in every text that does not say what kind of thing the rest is; lists are cut."""
    if isinstance(value, dict):
        return {name: tampered(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [tampered(part, key) for part in value[:6]]
    if not isinstance(value, str) or key in KEPT:
        return value
    return " ".join([FENCE, value, *HOSTILE] if " " in value else [value, *HOSTILE])


def make_study(project: Path) -> StudyFile:
    """A project with the model, its task, and the study file."""
    for name in ("eelib", "eestudy", "notebooks", "_config.yml"):
        (project / name).symlink_to(ROOT / name)
    generated = shutil.ignore_patterns("_build", "generated", "results", "_toc.yml", "scripts")
    shutil.copytree(ROOT / "book", project / "book", ignore=generated)
    rows = [{"source": text.replace("\0", ""), "references": [text.replace("\0", "")]} for text in HOSTILE] * 2
    (project / f"{FILE}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    study = {"parameters": {"limit": 24, "max_new_tokens": 10, "device": "cpu"}}
    study["notebooks"] = {PAGE: {}}
    study["models"] = {save_model(project / "weird <b>" / "llama"): {"parameters": {"tasks": f"{FILE}.jsonl"}}}
    (project / "study.yml").write_text(yaml.safe_dump(study))
    return StudyFile.load(project / "study.yml")


def ended_well(done) -> None:
    """What a program said, where it failed."""
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def make_book(project: Path) -> Path:
    """The built book's folder."""
    with contextlib.chdir(ROOT):  # notebooks are looked for
        study = make_study(project)
    page = project / f"book/results/llama/{PAGE}.ipynb"
    page.parent.mkdir(parents=True)
    ended_well(papermill(project, PAGE, page, **study.parameters("llama", PAGE)))
    data, card = project / "altered", "models/pocket-llama/card.json"
    for name in (*(f"measured/{file.name}" for file in (ROOT / "data/measured").glob("*.json")), card):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        content = tampered(json.loads((ROOT / "data" / name).read_text(encoding="utf-8")))
        content |= {"name": " ".join(HOSTILE)} if name == card else {}
        (data / name).write_text(json.dumps(content), encoding="utf-8")
    (data / "papers").symlink_to(ROOT / "data/papers")
    file = project / f"results/llama/{PAGE}.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["claims"][1]["verdict"] = "not testable here"
    file.write_text(json.dumps(tampered(content)))
    for name in ("scripts", "generated/scripts"):
        (project / "book" / name).mkdir(parents=True)
    fragments = (sys.executable, "-m", "eestudy.book.fragments", "--study", "study.yml")
    ended_well(program(project, *fragments, EELIB_DATA=str(data)))
    build = ("jupyter-book", "build", "book", "--config", "_config.yml", "--path-output", "book", "-n", "-W")
    ended_well(program(project, *build))
    return project / "book/_build/html"


def harm(browser: Browser) -> dict:
    """What ran on the open page, or could; nothing where all is well."""
    browser.run(f"{TOUCH} true")
    browser.run("new Promise((done) => setTimeout(() => done(true), 200))")
    found = browser.run(FOUND)
    found["fetched"] = [url for url in browser.outside if "elsewhere" in url]
    return {name: value for name, value in found.items() if value or name == "shown"}


def test_nothing_runs_on_any_page_nor_in_search(tmp_path):
    book, shown = make_book(tmp_path), {}
    with contextlib.closing(Browser(tmp_path / "chromium", f"file://{quote(str(book))}/")) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        for page in SHOWING:
            browser.open(f"{page}.html")
            found = harm(browser)
            shown[page] = found.pop("shown")
            assert not found, page
        assert all(count > 3 for count in shown.values()), shown
        browser.open(f"search.html?q={quote(HOSTILE[0])}")
        assert browser.until("document.querySelector('#search-results li') !== null", 60)
        browser.run("new Promise((done) => setTimeout(() => done(true), 3000))")  # its excerpts come later
        assert not {name: value for name, value in harm(browser).items() if name != "shown"}
