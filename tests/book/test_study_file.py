"""The study file: what it refuses, what it runs with which parameters, what its pages depend on."""

import json
import shlex
from pathlib import Path

import pytest

from eestudy.book.study_file import StudyFile
from eestudy.claims import claims

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project with notebooks of a few names, in which each test works."""
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for name in ("a", "b", "n", "m", "length", "architectures", "tiny"):
        Path(f"notebooks/{name}.ipynb").write_text("{}")


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
        models: {some/model: {parameters: {limit: 2, tasks: b}}, idle: {enabled: false}}""",
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
    assert {"file": "results/model/length"} in study.contents()["parts"][0]["chapters"]


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
        ("first: [m]\nmodels: {a: {}}\nnotebooks: {n: {}}", r"first is \['m'\]; allowed is a list of some of n"),
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


def test_a_model_has_its_own_threads_and_the_longest_notebooks_go_first(tmp_path):
    text = "threads: 8\nfirst: [b]\nnotebooks: {a: {}, b: {}}\nmodels: {small: {threads: 1}, large: {}}"
    study = StudyFile.load(write_study(tmp_path, text))
    assert [study.threads_of(model) for model in study.models] == [1, 8] and study.first == ("b",)


def test_a_page_depends_on_the_weights_of_every_shipped_model_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("EELIB_DATA", "data")
    for name in ("main", "beside", "beside-2", "other"):
        Path(f"data/models/{name}").mkdir(parents=True)
        Path(f"data/models/{name}/model.safetensors").write_text(name, encoding="utf-8")
    Path("data/gates/beside").mkdir(parents=True)
    Path("data/gates/beside/lstm.safetensors").write_text("gate", encoding="utf-8")
    Path("notebooks/n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": "x = 'beside on a'"}]}))
    study = StudyFile.load(write_study(tmp_path, "notebooks: {n: {after: other}, m: {}}\nmodels: {main: {}}"))
    weights = {Path(file).parent.name for file in study.notebook_sources("main", "n") if "models" in file}
    assert weights == {"main", "beside", "other"}
    assert "data/gates/beside/lstm.safetensors" in study.notebook_sources("main", "n")


def test_the_study_decodes_as_many_sequences_as_claims_need(monkeypatch):
    monkeypatch.chdir(ROOT)
    source = json.loads(Path("notebooks/speed.ipynb").read_text())["cells"][1]["source"]
    default = next(int(line.split("=")[1].split("#")[0]) for line in source if line.startswith("sequences: int"))
    asked = StudyFile.load("study.yml").parameters("smollm2-135m-instruct", "speed").get("sequences", default)
    assert asked >= max(claim.minimum_sequences for claim in claims("speed"))


def test_a_page_depends_on_kept_figures_that_its_code_reads(monkeypatch):
    monkeypatch.chdir(ROOT)
    study = StudyFile.load(ROOT / "study.yml")
    for notebook, kept in (("architectures", "scale"), ("joint_optimization", "ablation"), ("length", None)):
        found = {Path(file).name for file in study.notebook_sources("smollm2-135m-instruct", notebook)}
        assert found & {"scale.json", "ablation.json"} == ({f"{kept}.json"} if kept else set())


def test_local_files_are_those_that_parameters_name_hidden_ones_aside(tmp_path, monkeypatch):
    for name in ("model/model.safetensors", "model/.git/index", "model/sub/a.json", "texts/x.de-en.jsonl", "runs/t"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    beside = f"pocket-t5 on {tmp_path}/texts/x.de-en.jsonl,translation/*; a > {tmp_path}/none; ~nobody/x"
    text = f"notebooks: {{n: {{beside: '{beside}'}}}}\nmodels: {{{tmp_path}/model: {{}}}}"
    study = StudyFile.load(write_study(tmp_path, text))
    found = [line.split()[0] for line in study.local_files("model", "n")]
    names = ("model/model.safetensors", "model/sub/a.json", "texts/x.de-en.jsonl")
    assert found == [str(tmp_path / name) for name in names]
    monkeypatch.chdir(ROOT)
    assert not StudyFile.load("study.yml").local_files("smollm2-135m-instruct", "saturation")


@pytest.mark.parametrize("note", ["", "7", "true", "None"])
def test_texts_stay_texts_in_papermill_s_arguments(tmp_path, note):
    text = f"parameters: {{note: '{note}', limit: 3}}\nnotebooks: {{tiny: {{}}}}\nmodels: {{some/model: {{}}}}"
    words = shlex.split(StudyFile.load(write_study(tmp_path, text)).arguments("model", "tiny"))
    assert words[words.index("note") - 1 :][:3] == ["-r", "note", note]
    assert words[words.index("limit") - 1 :][:3] == ["-p", "limit", "3"]


def test_what_the_lens_loads_depends_on_weights_texts_and_code_and_its_page_on_the_scripts(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = StudyFile.lens_sources()
    assert {"eestudy/browser/weights.py", "eelib/tracing/make.py"} <= set(made)
    for name in ("models/pocket-llama/model.safetensors", "texts/translation/de-en.jsonl"):
        assert str(ROOT / "data" / name) in made
    study = StudyFile.load("study.yml")
    assert "lens" in study.pages and "book/scripts/lens/llama.js" in study.page_sources()


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# A page"]},
        {
            "cell_type": "code",
            "metadata": {"tags": ["parameters"]},
            "source": [
                'model: str = "none"\n',
                'tasks: str = "a,b"\n',
                "limit: int = 0  # all\n",
                "repeats: int = -1\n",
            ],
        },
    ]
}


def test_what_workers_make_is_what_the_notebooks_ask_for(tmp_path):
    """The study's values, else the notebook's own; once each, and the second model that a study names."""
    for name in ("n", "m", "length"):
        Path(f"notebooks/{name}.ipynb").write_text(json.dumps(NOTEBOOK))
    study = StudyFile.load(
        write_study(
            tmp_path,
            """
        parameters: {limit: 1}
        notebooks: {n: {}, m: {}, length: {tasks: c, after: other/model}}
        models: {some/model: {workers: 3}, alone: {notebooks: [n]}}""",
        )
    )
    folders = {"runs_folder": "runs", "results_folder": "results"}
    first = {"model": "some/model", "tasks": "a,b", "limit": 1} | folders
    third = first | {"tasks": "c"}
    assert study.asked("model") == [first, third, third | {"model": "other/model"}]
    assert list(study.workers_of("model")) == [0, 1, 2] and not study.workers_of("alone")
    assert {"eestudy/book/worker.py", "eelib/tracing/store.py"} <= set(study.worker_sources("model"))


@pytest.mark.parametrize(
    "settings, found",
    [
        ("{}", 4),
        ("{memory_gb: 9}", 9),
        ("{memory_gb: 80, gpu: 1}", 16),
        ("{memory_gb: 80, gpu: 1, host_memory_gb: 40}", 40),
    ],
)
def test_memory_of_a_gpu_is_not_that_of_the_host(settings, found, tmp_path):
    study = StudyFile.load(write_study(tmp_path, f"models: {{a: {settings}}}\nnotebooks: {{n: {{}}}}"))
    assert study.host_memory("a") == found
