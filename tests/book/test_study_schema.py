"""What a study file may hold: everything else is refused in one line, before anything runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile

ROOT = Path(__file__).parents[2]
GOOD = "models: {a: {}}\nnotebooks: {n: {}}\n"
STUDIES: list[tuple[str, str]] = [  # and a part of what is said of each
    ("", "it is None; allowed is a mapping with notebooks and models"),
    ("[models, notebooks]", "it is ['models', 'notebooks']; allowed is a mapping"),
    ("models: {a: {}}", "it has no notebooks"),
    ("models: [a]\nnotebooks: {n: {}}", "models is ['a']; allowed is a mapping of at least one model"),
    ("models: {}\nnotebooks: {n: {}}", "models is {}; allowed is a mapping of at least one model"),
    ("models: {a: {}}\nnotebooks: [n]", "notebooks is ['n']; allowed is a mapping of at least one notebook"),
    ("models: {a: {}}\nnotebooks:", "notebooks is None"),
    ("models: {a: [1]}\nnotebooks: {n: {}}", "model a is [1]; allowed is a mapping of settings"),
    ("models: {a: {}}\nnotebooks: {n: [1]}", "notebook n is [1]; allowed is a mapping of parameters"),
    ("models: {a: {}}\nnotebooks: {unheard: {}}", "notebook unheard is not known; there are a, architectures, b"),
    *((f"threads: {n}\n{GOOD}", f"threads is {n}; allowed is a whole number, at least 1") for n in (0, -1, 1.5)),
    ("threads: many\n" + GOOD, "threads is 'many'"),
    ("threads: true\n" + GOOD, "threads is True"),
    ("threads:\n" + GOOD, "threads is None"),
    ("first: n\n" + GOOD, "first is 'n'; allowed is a list of names of notebooks"),
    ("first: [[n]]\n" + GOOD, "first[0] is ['n']; allowed is a text"),
    ("parameters: [limit]\n" + GOOD, "parameters is ['limit']; allowed is a mapping of parameters"),
    ("parameters: {limit: [1]}\n" + GOOD, "parameters.limit is [1]; allowed is a text, a number, true or false"),
    ("parameters: {limit: }\n" + GOOD, "parameters.limit is None"),
    ("parameters: {limit: 2026-01-01}\n" + GOOD, "parameters.limit is datetime.date"),
    ("parameters: {'a b': 1}\n" + GOOD, "whose names are of letters, digits and _"),
    *(
        (f"models: {{x/a.b: {{{setting}: {given}}}}}\nnotebooks: {{n: {{}}}}", f"model x/a.b: {setting} is {said}")
        for setting, given, said in (
            ("memory_gb", "much", "'much'; allowed is a whole number, at least 1"),
            ("memory_gb", "0", "0;"),
            ("memory_gb", ".inf", "inf;"),
            ("host_memory_gb", "0", "0; allowed is a whole number, at least 1"),
            ("workers", "-1", "-1; allowed is a whole number, at least 0"),
            ("workers", "all", "'all'; allowed is a whole number"),
            ("hours", "0", "0; allowed is a whole number, at least 1"),
            ("partition", "'a b'", "'a b'; allowed is a name of letters"),
            ("partition", "3", "3; allowed is a name of letters"),
            ("enabled", "'no'", "'no'; allowed is true or false"),
            ("enabled", "1", "1;"),
            ("gpu", "one", "'one'; allowed is a whole number, at least 0"),
            ("gpu", "-1", "-1;"),
            ("gpu", "0x7fffffffffff", "140737488355327; allowed is a whole number, at least 0, at most 100,000"),
            ("workers", "1000000000", "1000000000;"),
            ("memory_gb", "1.0e+300", "1e+300;"),
            ("parameters", "{model: other}", "{'model': 'other'}; allowed is a mapping of parameters"),
            ("gpu", "true", "True;"),
            ("threads", "0", "0;"),
            ("notebooks", "[n, n]", "['n', 'n']; allowed is a list of names of notebooks, each once"),
            ("parameters", "fast", "'fast'; allowed is a mapping of parameters"),
        )
    ),
    ("models: {7: {}}\nnotebooks: {n: {}}", "line 1: the key '7' is not a text"),
    ("models: {a: {}, [b]: {}}\nnotebooks: {n: {}}", "is not a text"),
    ("models: {yes: {}}\nnotebooks: {n: {}}", "the key 'yes' is not a text"),
    ("models: {a: {}, a: {}}\nnotebooks: {n: {}}", "line 1: the key 'a' is there for the second time"),
    (GOOD + "models: {b: {}}", "line 3: the key 'models' is there for the second time"),
    ("models: {x/m: {}, y/m: {}}\nnotebooks: {n: {}}", "two models would share the folder results/m"),
    ("models: {../..: {}}\nnotebooks: {n: {}}", "the last part of its name, '..' is not allowed"),
    (f"models: {{{'x' * 300}: {{}}}}\nnotebooks: {{n: {{}}}}", "has 300 characters; allowed are at most 100"),
    ("parameters: {results_folder: /etc}\n" + GOOD, "none of model, runs_folder, results_folder"),
    ("models: {'': {}}\nnotebooks: {n: {}}", "the last part of its name, '' is not allowed"),
    ("models: {'a\\nb': {gpu: one}}\nnotebooks: {n: {}}", "gpu is 'one'"),
    ("models: &a {a: *a}\nnotebooks: {n: {}}", "model a: unknown ['a']"),
    ("models: {a: {}\nnotebooks: {n: {}}", "line 2: "),
    ("models: !!python/object:os.system {}\nnotebooks: {n: {}}", "could not determine a constructor"),
    ("models: {a: *b}\nnotebooks: {n: {}}", "undefined alias"),
    ("\x07", "not YAML"),
    ("[" * 5_000, "nested too deeply"),
]
NAMES = (
    "$(touch made)",
    "a;touch made",
    "a'b",
    'a"b',
    "{a}",
    "<b>a</b>",
    "a\nb",
    "a\u202eb",
    "\u00e9",
    "*",
)  # of folders


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project with notebooks of a few names, in which each test works."""
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for name in ("a", "architectures", "b", "n"):
        Path(f"notebooks/{name}.ipynb").touch()


def write_study(folder: Path, text: str) -> Path:
    path = folder / "study.yml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text, part", STUDIES, ids=range(len(STUDIES)))
def test_a_study_that_is_none_is_refused_in_one_line(text, part, tmp_path, one_line):
    one_line(InputError, ("study.yml: ", part), lambda: StudyFile.load(write_study(tmp_path, text)))


def test_names_that_no_folder_or_shell_should_see_are_refused(tmp_path, one_line):
    for name in NAMES:
        model = json.dumps({"models": {f"x/{name}": {}}, "notebooks": {"n": {}}})
        notebook = json.dumps({"models": {"a": {}}, "notebooks": {name: {}}})
        for text, part in ((model, "the last part of its name"), (notebook, "the name of notebook")):
            one_line(InputError, part, lambda: StudyFile.load(write_study(tmp_path, text)))


def test_brackets_without_end_are_refused_in_seconds_of_work(tmp_path, one_line):
    began = time.process_time()
    one_line(InputError, "nested too deeply", lambda: StudyFile.load(write_study(tmp_path, "[" * 1_000_000)))
    assert time.process_time() - began < 3


def test_a_study_file_that_can_not_be_read(tmp_path, one_line):
    (tmp_path / "latin.yml").write_bytes(b"models: {\xff: {}}")
    os.mkfifo(tmp_path / "pipe.yml")
    for name in ("latin.yml", "pipe.yml", "none.yml", "notebooks"):
        one_line(InputError, name, lambda: StudyFile.load(tmp_path / name))


def test_whole_numbers_in_other_words_and_merged_mappings_are_taken(tmp_path):
    text = "threads: 2.0\nmodels: {a: &a {memory_gb: 4.0}, b: {<<: *a, gpu: 1}}\nnotebooks: {n: }"
    study = StudyFile.load(write_study(tmp_path, text))
    assert study.models["b"] == {"memory_gb": 4, "gpu": 1, "model": "b"} and study.threads == 2


def test_a_wrong_study_is_refused_before_anything_large_is_imported(tmp_path):
    """As `make book` does it, before Snakemake is started."""
    path = write_study(tmp_path, "threads: 0\n" + GOOD)
    code = (
        "import runpy, sys; sys.argv[1:] = ['study.yml']\n"
        "try: runpy.run_module('eestudy.book', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'pandas', 'snakemake', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "[]\n"
    assert done.stderr == f"{path.name}: threads is 0; allowed is a whole number, at least 1, at most 100,000\n"
