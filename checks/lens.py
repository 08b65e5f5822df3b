"""How many tokens a second the lens in the page writes, in a real browser.

A headless Chromium opens the page's own scripts with the shipped model, writes the first sentences of each direction at
full depth, reading every layer, and sends back tokens and seconds. Needs Chromium; tests/browser.sh installs one.
"""

import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from checks.report import Goal, finish, goal, headed, options
from eelib.common.files import data_folder
from eelib.models.folder import weights_hash
from eelib.tasks.task import load_task
from eestudy.browser.__main__ import DIRECTIONS
from eestudy.browser.__main__ import main as write_scripts

BOOK = Path(__file__).parents[1] / "book"
MODEL, WANTED, LONGEST = "pocket-llama", 20.0, 900  # tokens a second; seconds that all may take
EACH = 3  # sentences of each direction
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HEADLESS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
WRITES = """<script>
(async (asked) => {
    await Lens.model.load(() => null);
    const found = [];
    for (const [direction, sentence] of asked) {
        const { before, after } = Lens.stored.directions.find(({ name }) => name === direction);
        const request = { before, after, room: Lens.stored.room, direction, sentence, rule: null };
        let tokens = 0;
        const { seconds } = await Lens.model.write(request, () => { tokens += 1; });
        found.push({ direction, tokens, seconds });
    }
    return found;
})(%s).then(JSON.stringify, String).then((body) => fetch("/found", { method: "POST", body }));
</script>"""


def site(folder: Path, asked: list[tuple[str, str]]) -> None:
    """The page's own part of book/lens.md with its scripts and the model, and a script that has it write."""
    shutil.copytree(BOOK / "scripts/lens", folder / "lens")
    write_scripts([MODEL, str(folder / "lens")])
    page = re.search(r"```\{raw\} html\n(.*?)\n```", (BOOK / "lens.md").read_text(encoding="utf-8"), re.DOTALL)
    assert page, "book/lens.md has no HTML of its own"
    content = f'<!doctype html><meta charset="utf-8">{page[1]}{WRITES % json.dumps(asked)}'
    (folder / "index.html").write_text(content, encoding="utf-8")


def measured(browser: str, folder: Path) -> list[dict]:
    """What the browser sends back of a folder: {direction, tokens, seconds} of each sentence."""
    sent: queue.Queue[bytes] = queue.Queue()

    class Taking(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Taking, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/index.html"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *HEADLESS, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return json.loads(sent.get(timeout=LONGEST))
        finally:
            process.terminate()
            process.wait(timeout=30)
            server.shutdown()


def goals(rows: list[dict], load: float) -> list[Goal]:
    """The rate of all sentences, whatever else the machine did."""
    rate = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    shown = f"{rate:.1f}; the machine's load before was {load:.1f}"
    return [goal("tokens a second", rate, at_least=WANTED, shown=shown)]


def main() -> None:
    asked = options(__doc__, "lens").parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("There is no Chromium here, so the lens was not timed; tests/browser.sh installs one, as root.")
    head = headed("lens", depends=("eestudy/browser", "book/scripts/lens", "book/lens.md"))
    release = subprocess.run([browser, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    sources = {name: load_task(f"translation/{name}").sources[:EACH] for name in DIRECTIONS}
    with tempfile.TemporaryDirectory() as folder:
        site(Path(folder), [(name, sentence) for name, chosen in sources.items() for sentence in chosen])
        rows = measured(browser, Path(folder))
    head["models"] = {MODEL: weights_hash(data_folder("models", MODEL))}
    finish(asked.output, head, goals(rows, head["machine"]["load"]), browser=release, model=MODEL, rows=rows)
