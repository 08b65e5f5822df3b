"""What notebooks share: a bad parameter is one clear line, and results are whole."""

import json
import math
from types import SimpleNamespace
from unittest import mock

import families
import numpy as np
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from planted import asked, sentences, write_task
from traitlets.config import Config

from eelib.common.errors import CheckpointError, InputError
from eelib.models.lens_adapters import Translators, save_translators
from eelib.tasks.task import Task
from eelib.tracing.decode import encode
from eestudy.figures.grids import example
from eestudy.markup.markdown import text
from eestudy.parameters import ParameterError, Parameters, check_parameters
from eestudy.resampling import NOTHING, Interval
from eestudy.results import Results, pct_ci
from eestudy.study import Study, lens_of, pair_of, pairs_beside, prompted, studies_beside, study_named

DECLARED = """model: str = "pocket-llama"  # a shipped name
tasks: str = "translation/de-en"  # tasks
limit: int = 200  # sequences
max_new_tokens: int = 64  # tokens
dtype: str = "float32"  # type
device: str = "cpu"  # device
after: str = ""  # a version
lens: str = ""  # a version
threshold: float = 0.5  # ours
show_all: bool = False  # ours
unit: str = "token"  # ours
share: float = 0.5  # ours"""


def check(injected, declared=DECLARED):
    """check_parameters in a kernel in which these cells ran."""
    namespace = {"In": ["import eelib", "%matplotlib inline\nx: int = 3", declared, f"# Parameters\n{injected}\n"]}
    exec(declared + "\n" + injected, namespace)
    with mock.patch("IPython.get_ipython", lambda: SimpleNamespace(user_ns=namespace)):
        return check_parameters({"unit": ("token", "output")}, {"limit": 2}, ("share",))


def test_values():
    found = check('limit = 5\ntasks = "translation/*"\nthreshold = 1\nunit = "output"')
    assert (found.limit, found["tasks"], found.threshold, found.show_all) == (5, "translation/*", 1, False)
    assert list(found) == [line.split(":")[0] for line in DECLARED.splitlines()] and found.unit == "output"
    with pytest.raises(AttributeError):
        _ = found.nothing


@pytest.mark.parametrize(
    "injected, parts",
    [
        ("limt = 5", ("'limt'", "limit", "max_new_tokens")),
        ('limit = "5"', ("limit", "'5'", "int")),
        ("show_all = 1", ("show_all", "bool")),
        ('model = " "', ("model", "empty")),
        ("max_new_tokens = 0", ("max_new_tokens", "1 or more")),
        ('dtype = "int8"', ("dtype", "'int8'", "bfloat16")),
        ('tasks = "translation/xx"', ("'translation/xx'", "translation/de-en")),
        ('device = "gpu"', ("'gpu'", "cuda")),
        ('unit = "word"', ("unit", "'word'", "'token', 'output'")),
        ("limit = 1", "it must be 2 or more"),
        ("share = 1", "share is 1; it must lie between 0 and 1"),
    ],
)
def test_bad_parameter(injected, parts, one_line):
    one_line(ParameterError, parts, lambda: check(injected))


def test_a_declared_type_that_no_parameter_has(one_line):
    one_line(
        ParameterError, "layers is declared as list; allowed: int", lambda: check("", DECLARED + "\nlayers: list = []")
    )


def test_in_a_kernel(capsys):
    """Cells are found by themselves, and the failure shows as one line without a traceback."""
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    for cell in ("from eestudy.parameters import check_parameters", DECLARED, "# Parameters\nlimt = 3"):
        assert shell.run_cell(cell, store_history=True).success
    capsys.readouterr()
    result = shell.run_cell("parameters = check_parameters()", store_history=True)
    InteractiveShell.clear_instance()
    shown = "".join(capsys.readouterr()).strip()
    assert isinstance(result.error_in_exec, ParameterError)
    assert shown.splitlines() == [shown] and shown.startswith("ParameterError: parameter 'limt' is not known")


@pytest.mark.parametrize("cause, before", [(InputError("no file"), []), (TypeError("no sum"), ["TypeError: no sum"])])
def test_an_error_of_another_library_is_shown_before_the_line(cause, before):
    error, between = ParameterError("model x can't be read"), CheckpointError("it can't be read")
    error.__cause__, between.__cause__ = between, cause
    shown = error._render_traceback_()
    assert shown[-2:-1] == before and shown[-1] == "ParameterError: model x can't be read"


@pytest.mark.parametrize(
    "model, after, lens",
    [
        ("tiny", "tiny-joint", "tiny-lens"),
        ("folder/tiny.gguf", "tiny-joint", "tiny-lens"),
        ("other", "other-joint", "other-lens"),
        ("folder/other", "", "other-lens"),  # the adapters in other-joint are of another model, which has the same name
        ("third", "", ""),
    ],
)
def test_auto_is_the_shipped_version_of_the_model(model, after, lens, monkeypatch, tmp_path):
    for module in ("eelib.common.files", "eestudy.parameters"):
        monkeypatch.setattr(f"{module}.data_folder", tmp_path.joinpath)
    for version in ("tiny-joint", "tiny-lens", "other-joint", "other-lens"):
        (tmp_path / "models" / version).mkdir(parents=True)
    config = '{"base_model_name_or_path": "other", "r": 1, "lora_alpha": 1}'
    (tmp_path / "models/other-joint/adapter_config.json").write_text(config)
    (tmp_path / "models/other-joint/adapter_model.safetensors").touch()
    found = check(f"model, after, lens = {model!r}, 'auto', 'auto'")
    assert (found.after, found.lens) == (after, lens) and check("model, lens = 'tiny', 'mine'").lens == "mine"


PAIRS = sentences(f"Sentence {i}." for i in range(4))


@pytest.fixture
def parameters(folder_of, tmp_path):
    write_task(tmp_path / "tiny.de-en.jsonl", PAIRS)
    values = asked(tmp_path, folder_of("gpt2"), str(tmp_path / "tiny.de-en.jsonl"))
    values |= {"limit": 3, "max_new_tokens": 4, "batch_size": 0, "dtype": "float32"}
    return lambda **more: Parameters(values | more)


def test_study_and_results(parameters, tmp_path):
    """One task on which a random model is below its baseline: a trace, its quality, and a file without NaN."""
    given = parameters()
    study = Study(given)
    made = study.traces[given.tasks]
    assert len(made.sequences) == 3 and set(study.quality[given.tasks]) == {"BLEU", "chrF"}
    assert study.above_baseline == {given.tasks: False} and study.why_not("above_baseline")
    names = {"share": Interval(0.5, 0.25, 0.75, 9), "counts": ["a"], "name": "a loop's variable", "digits": 2}
    results = Results("saturation", study, [], names)
    results.answer("{% if counts %}{{ share|pct_ci }} of {{ name }}{% endif %}{{ why }}")
    assert results.headline == f"50 \\[25,\u00a075]% of gpt2{text(study.why_not())}".replace("\u00a0", " ")
    results.say("{{ share|num(1) }} {{ digits }}", digits=3)
    assert {key: value["estimate"] for key, value in results.numbers.items()}["digits"] == 3
    assert set(results.numbers) == {"share", "name", "why", "digits"}  # a list of texts is no number
    results.say("{{ kinds['a']|ci }} {{ shares[0] }} {{ p.limit }}", kinds={"a": names["share"]}, shares=[0.5], p=given)
    results.say("{{ digits }}", digits=4)
    assert {*results.numbers} - {"share", "name", "why", "digits"} == {"kinds.a", "shares.0", "digits (2)"}
    assert pct_ci(Interval(1.0, math.nan, math.nan, 9)) == "100% (all alike)" and pct_ci(NOTHING) == "–"
    results.save()
    saved = json.loads((tmp_path / "results/gpt2/saturation.json").read_text(), parse_constant=pytest.fail)
    assert saved["overall"]["share"] == {"estimate": 0.5, "low": 0.25, "high": 0.75, "sequences": 9}
    assert saved["parameters"]["limit"] == 3 and saved["model"] == "gpt2" and saved["quality"] == study.quality
    kept = saved["traces"][given.tasks]
    assert kept["rows"] == len(made.tokens) and kept["mismatches"] == 0


def test_a_pair_is_of_one_shape_with_the_same_prompts(parameters, folder_of, tmp_path, one_line):
    """A chat template of one model alone is used by neither."""
    for one in pair_of(parameters(after=str(folder_of("gpt2"))), pairs=2):
        (made,) = one.traces.values()
        assert made.tokens["sequence"].to_numpy()[made.pairs["row"]].max() == 1  # layers of two outputs are compared
    others = [(str(folder_of(name)), "whose kind, type, layers") for name in ("t5", "llama")]  # the second of its sizes
    instructed = families.save("gpt2", tmp_path / "instructed")
    (instructed / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    others += [("", "parameter after is empty"), (str(instructed), "chat template is not that of")]
    for after, part in others:
        one_line(ParameterError, part, lambda: pair_of(parameters(after=after)))
    assert pair_of(parameters(after=str(instructed), chat="no"))[1].model.tokenizer.chat_template


def test_a_lens_reads_the_model_s_own_tokens_in_another_way(
    parameters, model_of, folder_of, tmp_path, one_line, capsys, monkeypatch
):
    base, study, moved = model_of("gpt2"), Study(parameters()), Translators(3, 32)
    moved.weight.data.normal_()
    save_translators(moved.requires_grad_(False), tmp_path / "lens", str(folder_of("gpt2")), base.hash)
    llama, lens = str(folder_of("llama")), parameters(lens=str(tmp_path / "lens"))
    same = lens_of(lens, study)["top1"] == study["top1"]
    assert same[:, [0, -1]].all() and not same.all() and lens_of(parameters(lens=""), study) is None
    for wrong, words in ((llama, "allowed is a folder with a tuned lens"), (f"{tmp_path}/none", "lens: model folder")):
        one_line(ParameterError, words, lambda: Study(parameters(lens=wrong)))
    wrong = ["parameter lens: ", "other weights"]
    one_line(ParameterError, wrong, lambda: lens_of(lens, Study(parameters(model=llama))))
    monkeypatch.setattr("eestudy.study.shipped_version", lambda *_: lens.lens)  # which no user has asked for by name
    assert lens_of(lens, Study(parameters(model=llama))) is None and "; it is left out." in capsys.readouterr().out
    study.tokens.loc[0, "token_id"] += 1  # a near tie that was decoded otherwise
    assert lens_of(lens, study) is None and "in near ties" in capsys.readouterr().out


def test_studies_on_other_tasks_take_neither_the_example_nor_the_wording_of_the_page(parameters, folder_of, tmp_path):
    write_task(tmp_path / "one.de-en.jsonl", PAIRS[:1])
    t5, tasks = folder_of("t5"), tmp_path / "one.de-en.jsonl"
    p = parameters(example_sequence=2, wording="{source}", beside_limit=0, beside_new_tokens=2)
    p |= {"beside": f"{t5} on {tasks}", "others": f"{t5} > {t5} on {tasks}"}
    studies = [*studies_beside(p), study_named(p, "beside"), *pairs_beside(p)[0]]
    assert [(one.parameters.example_sequence, one.parameters.wording) for one in studies] == [(-1, "auto")] * 4


def test_in_jupyterlab_too_a_study_made_from_another_s_parameters_has_its_folders(parameters, tmp_path, monkeypatch):
    (tmp_path / "project/notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project/notebooks")
    study = Study(parameters(runs_folder="runs", results_folder="results"))
    Results("saturation", Study(study.parameters), [], {}).save()
    assert sorted(path.name for path in (tmp_path / "project").iterdir()) == ["notebooks", "results", "runs"]
    assert not (tmp_path / "runs").exists()


def test_a_masked_model_counts_only_where_it_gives_back_its_texts(parameters, folder_of, tmp_path):
    texts = [f"The dogs of house {number} see the street." for number in range(30)]
    (tmp_path / "plain.txt").write_text("\n\n".join(texts))
    asked_of = {"tasks": str(tmp_path / "plain.txt"), "limit": 0}
    study = Study(parameters(model=str(folder_of("bert")), **asked_of))
    ((name, made),) = study.traces.items()
    assert study.sensible == study.above_baseline == {name: False} and "gives back" in study.why_not()
    knowing = Study(parameters(model=str(folder_of("bert")), **asked_of))
    made = knowing.traces[name]
    made.tokens["token_id"] = np.concatenate(encode(knowing.model, knowing.tasks[name]))  # as a trained one would
    assert knowing.sensible == knowing.above_baseline == {name: True} and not knowing.why_not()
    knowing.model = SimpleNamespace(labels=("no", "yes"), adapter=SimpleNamespace(writes=False))
    del knowing.sensible, knowing.above_baseline  # a classifier's labels of free prompts show nothing
    assert knowing.sensible == {name: False} and "baseline" in knowing.why_not()


def test_quality_where_prompts_were_skipped(parameters, tmp_path, one_line):
    """Outputs are scored against their own references when a prompt did not fit the window."""
    rows = [{"source": "word " * 200, "references": ["x"]}] + PAIRS[:2]
    write_task(tmp_path / "tiny.de-en.jsonl", rows)
    study = Study(parameters())
    made = next(iter(study.traces.values()))
    assert made.sequences["sequence"].tolist() == [1, 2] and made.manifest["skipped"] == 1
    assert example(made, 1) == 1
    one_line(ParameterError, "example_sequence 0 is not there", lambda: example(made, 0))
    task = next(iter(study.tasks.values()))
    kept = Task.from_prompts(task.prompts[1:], references=task.references[1:])
    expected = kept.quality(list(made.sequences["output"]))
    assert next(iter(study.quality.values())) == expected


@pytest.mark.parametrize(
    "given, part",
    [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": "data/.."}, "'..' is not allowed"),  # it would write beside the folder of results
        ({"runs_folder": "a file"}, "can't be made"),
        ({"results_folder": "a file"}, ("results_folder '", "a file' can't be written")),
        ({"example_sequence": 3}, ("example_sequence 3 is not in ", "the first task; allowed: -1 to 2")),
        ({"tasks": "classification/sst2", "wording": "short"}, "wording 'short' is used by none of class"),
        ({"beside": "pocket-t5"}, "allowed are entries such as"),
        ({"beside": "pocket-t5 on nothing/x"}, ("parameter beside, pocket-t5: ", "'nothing/x'")),
        ({"beside": "pocket-t5 on translation/de-en; pocket-t5 on translation/en-de"}, "names pocket-t5 twice"),
        ({"beside": "./absent on translation/de-en"}, "parameter beside: model folder './absent' does not exist"),
        ({"beside": "HERE/gpt2 on translation/de-en"}, ("parameter beside: ", "gpt2 has the name of ")),
        ({"EELIB_DATA": "nowhere"}, "there is no folder nowhere/papers; EELIB_DATA is 'nowhere'"),
    ],
)
def test_what_can_not_be_is_said_in_one_line_before_decoding(given, part, parameters, tmp_path, monkeypatch, one_line):
    (tmp_path / "a file").touch()
    (tmp_path / "gpt2").mkdir()
    values = {key: str(tmp_path / value) if "folder" in key else value for key, value in given.items()}
    if "beside" in values:
        values["beside"] = values["beside"].replace("HERE", str(tmp_path))
    if data := values.pop("EELIB_DATA", None):
        monkeypatch.setenv("EELIB_DATA", data)
    one_line(ParameterError, part, lambda: Study(parameters(**values)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "chat, wording, template, kind, expected",
    [
        ("auto", "auto", True, "summarization", (True, "short")),
        ("auto", "auto", False, "summarization", (False, "paper")),
        ("auto", "paper", True, "summarization", (True, "paper")),
        ("no", "auto", True, "summarization", (False, "paper")),
        ("yes", "auto", True, "continuation", (True, "short")),
        ("yes", "Go on: {opening}", True, "continuation", (True, "Go on: {opening}")),
    ],
)
def test_a_task_is_asked_as_the_parameters_say(chat, wording, template, kind, expected, tmp_path):
    rows = {"summarization": {"article": "A b c.", "highlights": "A."}, "continuation": {"opening": "It was"}}
    task = write_task(tmp_path / "t.jsonl", [rows[kind]])
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ messages }}" if template else None))
    found = prompted(task, model, chat, wording)
    assert (found.chat, found.prompts) == (expected[0], task.worded(expected[1]).prompts)


def test_a_chat_needs_a_template(parameters, one_line):
    one_line(ParameterError, "no chat template; allowed: auto, no", lambda: Study(parameters(chat="yes")))


def test_a_bug_in_a_trace_is_no_parameters_fault(parameters, monkeypatch):
    monkeypatch.setattr(Task, "hash", property(lambda task: np.arange(2) + np.arange(3)))
    with pytest.raises(ValueError, match="could not be broadcast") as caught:
        Study(parameters())
    assert type(caught.value) is ValueError and caught.value.__cause__ is None


def text_study(outputs):
    """A study of one task with these outputs, as token ids, each without an end token."""
    tokens = pd.DataFrame([{"sequence": i, "token_id": token} for i, ids in enumerate(outputs) for token in ids])
    lengths = pd.DataFrame({"length": list(map(len, outputs))})
    trace = SimpleNamespace(tokens=tokens, sequences=lengths, statistic_rows=lambda: np.ones(len(tokens), dtype=bool))
    study = Study.__new__(Study)
    study.traces, study.model = {"t": trace}, SimpleNamespace(adapter=SimpleNamespace(writes=True))
    return study


def test_exit_layers_are_judged_on_sensible_text():
    fresh, loop, short = list(range(20)), [1, 2, 3, 4] * 5, [1, 2, 3, 4]
    assert text_study([fresh] * 30).sensible == {"t": True}
    assert text_study([fresh] * 29 + [short]).sensible == {"t": False}  # 29 outputs are long enough
    assert text_study([fresh] * 30 + [loop] * 7).repetition["t"] == pytest.approx(140 / 740)
    assert text_study([fresh] * 30 + [loop] * 7).sensible == {"t": True}
    assert text_study([fresh] * 30 + [loop] * 8).sensible == {"t": False}
