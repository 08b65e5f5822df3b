"""The study file: what it refuses in one line before anything runs, what it runs with which parameters, and on what its
pages depend.
"""

import json
import shlex
from pathlib import Path

import pytest

from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile, defaults, notebook_file
from eestudy.claims import claims

ROOT = Path(__file__).parents[2]
WORKER = "eestudy/book/worker.py"
GOOD = "models: {a: {}}\nnotebooks: {n: {}}\n"
TYPED = GOOD.replace("n:", "typed:")
BAD: list[tuple[str, str]] = [  # and a part of the line that it gets
    ("", "it is None; allowed is a mapping with notebooks and models"),
    ("models: {a: {enabled: false}}\nnotebooks: {n: {}}", "no model"),
    ("models: {a: {}}\nnotebooks: {unheard: {}}", "notebook unheard is not known; there are a, architectures, b"),
    ("threads: 0\n" + GOOD, "threads is 0; allowed is a whole number, at least 1"),
    ("parameters: {limit: [1]}\n" + GOOD, "parameters.limit is [1]; allowed is a text, a number, true or false"),
    ("parameters: {results_folder: /etc}\n" + GOOD, "none of model, runs_folder, results_folder"),
    ("models: {x/a.b: {gpu: 100001}}\nnotebooks: {n: {}}", "model x/a.b: gpu is 100001; allowed is a whole number"),
    ("models: {a: {notebooks: [m]}}\nnotebooks: {n: {}}", "a: notebooks is ['m']; allowed is a list of some of n"),
    ("models: {a: {}, a: {}}\nnotebooks: {n: {}}", "line 1: the key 'a' is there for the second time"),
    ("models: {x/$(touch made): {}}\nnotebooks: {n: {}}", "the last part of its name, '$(touch made)' is not allowed"),
    ("models: {a: {}}\nnotebooks: {'a;touch made': {}}", "the name of notebook 'a;touch made' is not allowed"),
    ("models: {x/m: {}, y/m.gguf: {}}\nnotebooks: {n: {}}", "two models would share the folder results/m"),
    ("models: {a: {}\nnotebooks: {n: {}}", "line 2: "),
    ("models: !!python/object:os.system {}\nnotebooks: {n: {}}", "could not determine a constructor"),
    ("parameters: {chat: yes}\n" + TYPED, "notebook typed: chat is True; it must be of type str"),
    ("parameters: {limit: 010}\n" + GOOD, "line 1: '010' has a leading 0 or a colon"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project with notebooks of a few names, in which each test works."""
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for name in ("a", "architectures", "b", "length", "n"):
        Path(f"notebooks/{name}.ipynb").write_text("{}")
    write_notebook("typed", 'chat: str = "auto"\n', "limit: int = 0\n", "share: float = 0.5\n")


def write_notebook(name: str, *parameters: str) -> None:
    """A notebook with these lines of parameters alone."""
    cells = [{"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": parameters}]
    Path(f"notebooks/{name}.ipynb").write_text(json.dumps({"cells": cells}))


def load(text: str) -> StudyFile:
    Path("study.yml").write_text(text, encoding="utf-8")
    return StudyFile.load("study.yml")


@pytest.mark.parametrize("text, part", BAD, ids=range(len(BAD)))
def test_a_study_that_is_none_is_refused_in_one_line(text, part, one_line):
    one_line(InputError, ("study.yml: ", part), lambda: load(text))


def test_a_file_that_can_not_be_read_is_named_in_one_line(one_line):
    Path("latin.yml").write_bytes(b"models: {\xff: {}}")
    for name in ("latin.yml", "none.yml"):
        one_line(InputError, name, lambda name=name: StudyFile.load(name))
    Path("notebooks/n.ipynb").write_text("limit: int = 1")
    one_line(InputError, "notebooks/n.ipynb: its parameters can't be read (", lambda: load(GOOD))


def test_parameters_of_a_notebook_win_over_those_of_its_model_and_these_over_the_shared():
    """Texts stay texts in papermill's arguments, and models run the notebooks that they name, or all."""
    study = load("""
        first: [length]
        threads: 8.0
        parameters: {limit: 1, tasks: '7', dtype: float32}
        notebooks: {architectures: , length: {limit: 3}}
        models:
          some/model: &same {parameters: {limit: 2, tasks: ''}, threads: 1}
          other/classifier.gguf: {<<: *same, notebooks: [architectures], threads: 2}
          idle: {enabled: false}""")
    folders = {"runs_folder": "runs", "results_folder": "results"}
    known = {"model": "some/model", "limit": 3, "tasks": "", "dtype": "float32"} | folders
    assert study.parameters("model", "length") == known and study.first == ("length",)
    assert [settings["threads"] for settings in study.models.values()] == [1, 2] and study.threads == 8
    words = shlex.split(study.arguments("model", "length"))
    assert words[words.index("tasks") - 1 :][:3] == ["-r", "tasks", ""]
    assert words[words.index("limit") - 1 :][:3] == ["-p", "limit", "3"]
    assert study.runs == [("model", "architectures"), ("model", "length"), ("classifier", "architectures")]
    chapters = [part["chapters"] for part in study.contents()["parts"]]
    assert {"file": "results/model/length"} in chapters[0]
    assert chapters[2] == [{"file": "results/classifier/architectures"}]


def test_what_workers_make_is_what_the_notebooks_ask_for():
    """The study's values, else the notebook's own; once each, and the second model that a study names."""
    source = ['model: str = "none"\n', 'tasks: str = "a,b"\n', "limit: int = 0  # all\n", "repeats: int = -1\n"]
    for name in ("n", "a", "length"):
        write_notebook(name, *source)
    study = load("""
        parameters: {limit: 1, wording: short}
        notebooks: {n: {}, a: {}, length: {tasks: c, after: other/model}}
        models: {some/model: {}}""")
    first = {"model": "some/model", "tasks": "a,b", "limit": 1, "wording": "short"}
    first |= {"runs_folder": "runs", "results_folder": "results"}
    third = first | {"tasks": "c"}
    assert study.asked("model") == [first, third, third | {"model": "other/model"}]
    assert {WORKER, "eelib/tracing/store.py"} <= set(study.worker_sources("model"))


def test_a_page_depends_on_the_weights_of_every_shipped_model_that_it_names(monkeypatch):
    monkeypatch.setenv("EELIB_DATA", "data")
    for name in ("main", "main-block", "main-2", "beside", "beside-2", "beside-features", "other"):
        Path(f"data/models/{name}").mkdir(parents=True)
        Path(f"data/models/{name}/model.safetensors").write_text(name, encoding="utf-8")
    Path("data/gates/beside").mkdir(parents=True)
    Path("data/gates/beside/lstm.safetensors").write_text("gate", encoding="utf-8")
    Path("notebooks/n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "x = 'beside on a'"}]}))
    study = load("notebooks: {n: {after: other}, a: {}}\nmodels: {main: {}}")
    weights = {Path(file).parent.name for file in study.notebook_sources("main", "n") if file.startswith("data/models")}
    assert weights == {"main", "main-block", "beside", "beside-features", "other"}
    assert "data/gates/beside/lstm.safetensors" in study.notebook_sources("main", "n")


def test_a_page_depends_on_the_local_files_that_parameters_name_hidden_ones_aside(tmp_path):
    names = ("base/w", "gates/g", "model/adapter_config.json", "model/sub/a.json", "texts/x.de-en.jsonl")
    for name in (*names, "model/.git/index", "runs/t"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    beside = f"pocket-t5 on {tmp_path}/texts/x.de-en.jsonl,translation/*; a > {tmp_path}/none; ~nobody/x"
    more = f"beside: '{beside}', gates_folder: {tmp_path}/gates"
    study = load(f"notebooks: {{n: {{{more}}}}}\nmodels: {{{tmp_path}/model: {{}}}}")
    found = [line.split()[0] for line in study.local_files("model", "n")]
    assert found == [str(tmp_path / name) for name in names]


def test_the_study_of_this_project(monkeypatch):
    """It decodes as many sequences as claims need; a page depends on kept figures that its code reads."""
    monkeypatch.chdir(ROOT)
    study, model = StudyFile.load("study.yml"), "smollm2-135m-instruct"
    asked = defaults(notebook_file("speed")) | study.parameters(model, "speed")
    assert asked["sequences"] >= max(claim.minimum_sequences for claim in claims() if claim.notebook == "speed")
    for page in study.notebook_sources(model, "length"), study.worker_sources(model):
        assert {"eelib/tracing/store.py", "eestudy/study.py"} <= set(page)
        assert {file for file in page if file.startswith(("eestudy/book/", "eestudy/browser/"))} <= {WORKER}
    for notebook, kept in (("architectures", {"scale.json"}), ("length", set())):
        found = {Path(file).name for file in study.notebook_sources(model, notebook)}
        assert found & {"scale.json", "ablation.json"} == kept
    made = {"eestudy/browser/weights.py", str(ROOT / "data/models/pocket-llama/model.safetensors")}
    assert made <= set(StudyFile.lens_sources()) and "lens" in study.pages
    assert {"book/scripts/lens/llama.js", "eestudy/book/layout.py", "eelib/common/files.py"} <= {*study.page_sources()}
