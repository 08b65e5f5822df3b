"""The lens in the page, in a real browser from file://, held against eelib: tokens, every layer, gates, early exit."""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser, needs_browser, submit, text_of

import eelib
from eelib.exits.exit_rule import ExitRule
from eelib.exits.gates.gate import gate_named
from eelib.tasks.task import Task
from eestudy.browser.__main__ import DIRECTIONS, main
from eestudy.figures.grids import explorer

ROOT = Path(__file__).parents[2]
NAME, FIRST, EACH, ROOM = "pocket-llama", 2, 2, 128
RULES = [("softmax_difference", 0.3), ("confidence", 0.4), ("entropy", 3.0), ("patience", 3)]
PRESS = "(key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
SLIDE = """(value) => { const slider = document.querySelector('[data-lens=threshold]');
    slider.value = value; slider.dispatchEvent(new Event('input')); }"""
pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the page's own part of book/lens.md, its scripts, and what is made for them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "book/scripts/lens", folder / "lens")
    main([NAME, str(folder / "lens")])
    page = re.search(r"```\{raw\} html\n(.*?)\n```", (ROOT / "book/lens.md").read_text(encoding="utf-8"), re.S)[1]
    (folder / "lens.html").write_text(f'<!doctype html><meta charset="utf-8"><title>lens</title>{page}', "utf-8")
    return folder


@pytest.fixture(scope="module")
def model():
    return eelib.load_model(NAME, device="cpu")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"), "file://")
    found.call("Emulation.setFocusEmulationEnabled", enabled=True)
    yield found
    found.close()


@pytest.fixture(scope="module")
def loaded(site, window):
    """The page with its model loaded, in a worker, from file://."""
    window.open(f"{site}/lens.html")
    window.run("Lens.model.load(() => null).then(() => true)")
    assert not window.errors
    return window


def write(window: Browser, direction: str, sentence: str, rule: dict | None = None) -> dict:
    """What the worker writes: tokens with their readouts, and seconds."""
    script = """async (request) => {
        const { before, after } = Lens.stored.directions.find(({ name }) => name === request.direction);
        const tokens = [];
        const done = await Lens.model.write({ before, after, room: Lens.stored.room, ...request },
            ({ pieces, ...token }) => tokens.push(token));
        return { tokens, ...done };
    }"""
    return window.run(script, {"direction": direction, "sentence": sentence, "rule": rule})


def sentences() -> list[tuple[str, str]]:
    """(direction, sentence): `EACH` of every shipped translation, none of them a stored example."""
    tasks = {name: eelib.load_task(f"translation/{name}") for name in DIRECTIONS}
    return [(name, sentence) for name, task in tasks.items() for sentence in task.sources[FIRST : FIRST + EACH]]


def test_every_layer_says_what_a_trace_says(loaded, model, tmp_path):
    """The same tokens, the same top-1 at every layer, probabilities within 1e-3."""
    written = [write(loaded, name, sentence) for name, sentence in sentences()]
    for name in DIRECTIONS:
        task = eelib.load_task(f"translation/{name}").pick(range(FIRST, FIRST + EACH))
        trace = eelib.trace(model, task, max_new_tokens=ROOM, folder=tmp_path, progress=False)
        for sequence, found in enumerate(written[:EACH]):
            rows = trace.tokens.index[trace.tokens["sequence"] == sequence]
            tokens = found["tokens"]
            assert [token["id"] for token in tokens] == trace.tokens["token_id"][rows].tolist()
            ids = np.array([token["ids"] for token in tokens])
            np.testing.assert_array_equal(ids[:, :, 0], trace["top1"][rows])
            shares = np.array([token["shares"] for token in tokens])
            np.testing.assert_allclose(shares, trace["topk_probability"][rows], atol=1e-3)
            np.testing.assert_allclose([token["entropy"] for token in tokens], trace["entropy"][rows], atol=1e-3)
        del written[:EACH]


def test_the_tokenizer_is_that_of_the_model(loaded, model):
    """The same ids, and the same text of them, also of what tokenizers trip over."""
    texts = [
        "", " ", "  two  spaces ", "tab\tand\nline\r\n\nend\n", "10000 3,14 1234567 ½ ², ١٢٣", "\x00\x01\x7f",
        "naïve cafe\u0301 e\u0301\u0323", "👩‍👩‍👧 🇩🇪 👍🏽!", "汉字 かな 한국어", "שלום עולם", "\u0301 alone",
        "a\u0085b\ufeffc\u200bd\u00a0e\u3000f\u180eg", "<|end|>", "x<|pad|>y", "\n### Response:\n### Response:\n",
        "don't ''' \"quoted\" – — … ###", "ÄÖÜ äöü ß ŒœÆæ çéèêëîïôùûÿ ÀÉÈ", "İıǅﬁ", "𝔘𝔫𝔦 𐍈 \U0001f9ff",
    ]  # fmt: skip
    texts += [text for name in DIRECTIONS for text in eelib.load_task(f"translation/{name}").sources[:60]]
    letters, seed = "aé ß\n.,!?'-9#ü😀\u0301\u00a0Ω漢<|end|>", random.Random(0)
    texts += ["".join(seed.choices(letters, k=seed.randint(1, 24))) for _ in range(200)]
    script = """async (texts) => {
        const part = await Lens.model.script("network.js");
        const tokenizer = new Lens.Tokenizer(part.tokenizer);
        return texts.map((text) => {
            const ids = tokenizer.encode(text);
            return [ids, Lens.textOf(ids.map((id) => tokenizer.pieces[id]))];
        });
    }"""
    for text, (ids, back) in zip(texts, loaded.run(script, texts), strict=True):
        assert ids == model.tokenizer([text])["input_ids"][0], text
        assert back == text


@pytest.mark.parametrize("name, bound", RULES)
def test_gates_leave_where_eelib_s_do(name, bound, loaded, model, monkeypatch):
    """What the page writes with copied keys, `eelib.generate` writes."""
    monkeypatch.setattr("eelib.exits.decoding.loop.BATCH_SPLIT", 0)
    rule = ExitRule(gate_named(name), -bound if name == "entropy" else bound)
    chosen = sentences()[:: 2 * EACH]
    prompts = [eelib.load_task(f"translation/{name}").prompts[FIRST] for name, _ in chosen]
    made = eelib.generate(model, Task.from_prompts(prompts), rule, kv_policy="copy", max_new_tokens=ROOM)
    assert (made.tokens["layers_run"] < model.layers).any()
    for sequence, (direction, sentence) in enumerate(chosen):
        found = write(loaded, direction, sentence, {"gate": name, "threshold": bound})
        rows = made.tokens[made.tokens["sequence"] == sequence]
        for key, column in (("id", "token_id"), ("exit", "exit_layer"), ("ran", "layers_run")):
            assert [token[key] for token in found["tokens"]] == rows[column].tolist(), key


def test_the_page_says_everything_before_any_click(site, window):
    """The stored example's grid, details, exits and output, from eelib, with no weights loaded."""
    window.open(f"{site}/lens.html")
    stored = window.run("Lens.stored.examples[0]")
    grid = window.run(
        "[...document.querySelectorAll('.lens tbody tr')].map(r => r.querySelectorAll('[data-layer]').length)"
    )
    assert grid == [13] * len(stored["tokens"])
    assert window.run("document.querySelectorAll('[data-lens=details] li').length") == 10
    assert window.run("document.querySelectorAll('.lens-exit').length") == len(stored["tokens"])
    assert len(text_of(window, "full")) > 5 and "blocks need not run" in text_of(window, "summary")
    assert text_of(window, "reference") == eelib.load_task("translation/de-en").references[0][0]
    window.run('document.querySelector(\'td[data-index="1"][data-layer="3"]\').focus()')
    assert "Token 2" in text_of(window, "details") and "after block 3" in text_of(window, "details")
    for key, place in (("ArrowDown", "after block 3"), ("Home", "at the embeddings"), ("End", "after block 12")):
        window.run(PRESS, key)
        assert "Token 3" in text_of(window, "details") and place in text_of(window, "details")
    before = text_of(window, "summary")
    window.run(SLIDE, 0.1)
    assert text_of(window, "summary") != before
    assert window.run("performance.getEntriesByType('resource').some(e => e.name.includes('weights-'))") is False
    assert not window.errors


def test_what_is_typed_is_read_and_is_never_markup_and_early_exit_shows_what_did_not_run(loaded):
    hostile = 'Der <img src=x onerror="window.broken=1"> Hund & <b>Katze</b>.'
    submit(loaded, hostile)
    assert loaded.run("document.querySelectorAll('.lens :is(img, caption b)').length + (window.broken ?? 0)") == 0
    assert hostile in loaded.run("document.querySelector('.lens caption').textContent")
    assert "a second" in text_of(loaded, "status") and not text_of(loaded, "complaint") and not loaded.errors
    loaded.run(SLIDE, 0.3)
    loaded.run("document.querySelector('[data-lens=restart]').click()")
    assert loaded.until("document.querySelector('[data-lens=stop]').hidden", 60)
    assert loaded.run("document.querySelectorAll('.lens-not-run').length") > 0
    assert "did not run" in text_of(loaded, "summary") and text_of(loaded, "early")
    loaded.run("document.querySelector('[data-lens=back]').click()")
    assert loaded.run("document.querySelectorAll('.lens-not-run').length") == 0 and not loaded.errors


@pytest.mark.parametrize("sentence, line", [(" \n ", "Type a sentence"), ("Hund " * 600, "too long: ")])
def test_a_sentence_that_can_t_be_read_gets_one_line(sentence, line, loaded):
    before = text_of(loaded, "full")
    submit(loaded, sentence)
    said = text_of(loaded, "complaint")
    assert line in said and "\n" not in said and len(said) < 100
    assert text_of(loaded, "full") == before and not loaded.errors


def test_a_part_that_is_missing_is_named_and_after_a_crash_of_the_worker_the_model_is_loaded_anew(site, window):
    """Whoever asked gets one line; the next sentence is read."""
    part, away = site / "lens/weights-02.js", site / "lens/away.js"
    window.open(f"{site}/lens.html")
    part.rename(away)
    try:
        submit(window, "Guten Tag.")
        assert "weights-02.js" in text_of(window, "complaint")
    finally:
        away.rename(part)
    submit(window, "Guten Tag.")
    assert not text_of(window, "complaint") and "a second" in text_of(window, "status")
    crash = """(async () => {
        const { before, after } = Lens.stored.directions[0];
        const request = { before, after, room: Lens.stored.room, sentence: "Der Hund", rule: null };
        const pending = Lens.model.write(request, () => null).then(() => "it went on", (error) => error.message);
        Lens.model.worker.onerror(new ErrorEvent("error", { message: "out of memory" }));
        return pending;
    })()"""
    assert window.run(crash) == "out of memory" and not window.run("Lens.model.ready")
    submit(window, "Der Hund schläft.")
    assert not text_of(window, "complaint") and "a second" in text_of(window, "status")


def test_stored_outputs_are_explored_without_a_model_and_are_never_markup(site, window):
    """What a result page holds: choose an output, look at a cell; names and texts of tokens stay text."""
    texts = ["</script><img src=x onerror='window.broken=1'>", "<b>&lt;", "é", "$x$"]

    def token(first, second):
        ids, shares = [[first, second], [second, first]], [[0.6, 0.4]] * 2
        return {"id": second, "ids": ids, "shares": shares, "entropy": [0.2] * 2}

    outputs = [{"name": texts[0], "tokens": [token(0, 1)]}, {"name": "other", "tokens": [token(3, 2)] * 3}]
    page = site / "results/model/explore.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<!doctype html><meta charset="utf-8">{explorer(outputs, texts.__getitem__)}', "utf-8")
    window.open(str(page))
    cells = "[...document.querySelectorAll('.lens tbody [data-layer]')].map(cell => cell.textContent)"
    assert window.run(cells) == [texts[0], texts[1]]
    assert texts[0] in window.run("document.querySelector('.lens caption').textContent")
    window.run("""(() => { const choice = document.querySelector('[data-lens=output]');
        choice.value = 1; choice.dispatchEvent(new Event('change')); })()""")
    assert window.run(cells) == ["$x$", "é"] * 3
    window.run('document.querySelector(\'td[data-index="2"][data-layer="0"]\').click()')
    assert "Token 3, “é”, at the embeddings: entropy 0.20" in text_of(window, "details") and not window.errors
    assert window.run("document.querySelectorAll('.lens :is(img, b)').length + (window.broken ?? 0)") == 0
