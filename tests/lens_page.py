"""What tests do on the page with the lens."""

import json

from chromium import Browser


def call(window: Browser, script: str, *values):
    """The value of a JavaScript function given some values."""
    return window.run(f"({script})({', '.join(map(json.dumps, values))})")


def text_of(window: Browser, name: str) -> str:
    return window.run(f"document.querySelector('[data-lens={name}]').textContent")


def submit(window: Browser, sentence: str) -> None:
    """Type a sentence, ask for it, and wait until there is an output or a complaint."""
    call(
        window,
        """async (sentence) => {
            const part = (name) => document.querySelector(`[data-lens=${name}]`);
            part("sentence").value = sentence;
            part("sentence").dispatchEvent(new Event("input"));
            part("form").requestSubmit();
            while (!part("stop").hidden) await new Promise((go) => setTimeout(go, 20));
        }""",
        sentence,
    )
