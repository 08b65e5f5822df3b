"""What notebooks share: a bad parameter is one clear line, and results are whole."""

import json
import math
import shutil
from types import SimpleNamespace
from unittest import mock

import families
import numpy as np
import pandas as pd
import pytest
from oracle import assert_close
from planted import asked, sentences, write_task

from eelib.common.errors import InputError
from eelib.models.lens_adapters import Translators, save_translators
from eelib.tasks.task import Task
from eelib.tracing.columns import STORED
from eelib.tracing.decode import encode
from eestudy.figures.grids import example
from eestudy.markup.markdown import text
from eestudy.parameters import ParameterError, Parameters, check_parameters
from eestudy.resampling import NOTHING, Interval
from eestudy.results import Results, pct_ci
from eestudy.study import Study, lens_of, pair_of, prompted

DECLARED = """model: str = "pocket-llama"  # a shipped name
tasks: str = "translation/de-en"  # tasks
limit: int = 200  # sequences
max_new_tokens: int = 64  # tokens
dtype: str = "float32"  # type
device: str = "cpu"  # device
after: str = ""  # a version
lens: str = ""  # a version
unit: str = "token"  # ours
share: float = 0.5  # ours"""


def check(injected, declared=DECLARED):
    """check_parameters in a kernel in which these cells ran."""
    namespace = {"In": ["import eelib", "%matplotlib inline\nx: int = 3", declared, f"# Parameters\n{injected}\n"]}
    exec(declared + "\n" + injected, namespace)
    with mock.patch("IPython.get_ipython", lambda: SimpleNamespace(user_ns=namespace)):
        return check_parameters({"unit": ("token", "output")}, {"limit": 2}, ("share",))


@pytest.mark.parametrize(
    "injected, parts",
    [
        ("limt = 5", ("'limt'", "limit", "max_new_tokens")),
        ('limit = "5"', ("limit", "'5'", "int")),
        ('model = " "', ("model", "empty")),
        ('dtype = "int8"', ("dtype", "'int8'", "bfloat16")),
        ('tasks = "translation/xx"', ("'translation/xx'", "translation/de-en")),
        ('device = "gpu"', ("'gpu'", "cuda")),
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


def test_an_error_of_another_library_is_shown_before_the_line():
    for cause, before in ((InputError("no file"), []), (TypeError("no sum"), ["TypeError: no sum"])):
        error = ParameterError("model x can't be read")
        error.__cause__ = cause
        shown = error._render_traceback_()
        assert shown[-2:-1] == before and shown[-1] == "ParameterError: model x can't be read"


def test_auto_is_the_shipped_version_of_the_model(monkeypatch, tmp_path):
    """The adapters in other-joint are of a model that is not in a folder, but has the name of one that is."""
    for module in ("eelib.common.files", "eestudy.parameters"):
        monkeypatch.setattr(f"{module}.data_folder", tmp_path.joinpath)
    for version in ("tiny-joint", "tiny-lens", "other-joint", "other-lens"):
        (tmp_path / "models" / version).mkdir(parents=True)
    config = '{"base_model_name_or_path": "other", "r": 1, "lora_alpha": 1}'
    (tmp_path / "models/other-joint/adapter_config.json").write_text(config)
    (tmp_path / "models/other-joint/adapter_model.safetensors").touch()
    for model, after, lens in (("folder/tiny.gguf", "tiny-joint", "tiny-lens"), ("folder/other", "", "other-lens")):
        found = check(f"model, after, lens = {model!r}, 'auto', 'auto'")
        assert (found.after, found.lens) == (after, lens)


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
    assert set(results.numbers) == {"share", "name", "why", "digits"}  # a list of texts is no number
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
    others = [(str(folder_of("llama")), "whose kind, type, layers"), ("", "parameter after is empty")]
    instructed = families.save("gpt2", tmp_path / "instructed")
    (instructed / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    others.append((str(instructed), "chat template is not that of"))
    for after, part in others:
        one_line(ParameterError, part, lambda: pair_of(parameters(after=after)))
    assert pair_of(parameters(after=str(instructed), chat="no"))[1].model.tokenizer.chat_template


def test_a_lens_reads_the_model_s_own_tokens_in_another_way(
    parameters, model_of, folder_of, tmp_path, one_line, capsys, monkeypatch
):
    """From the states that the model's trace keeps, or as it decodes."""
    base, study, moved = model_of("gpt2"), Study(parameters()), Translators(3, 32)
    moved.weight.data.normal_()
    save_translators(moved.requires_grad_(False), tmp_path / "lens", str(folder_of("gpt2")), base.hash)
    llama, lens = str(folder_of("llama")), parameters(lens=str(tmp_path / "lens"))
    with monkeypatch.context() as patch:
        patch.setattr("eelib.tracing.make.read_outputs", None)
        read = lens_of(lens, study)
    same = read["top1"] == study["top1"]
    assert same[:, [0, -1]].all() and not same.all() and lens_of(parameters(lens=""), study) is None
    one_line(ParameterError, "allowed is a folder with a tuned lens", lambda: Study(parameters(lens=llama)))
    one_line(ParameterError, "other weights", lambda: lens_of(lens, Study(parameters(model=llama))))
    before = {name: read[name] for name in STORED}
    for one in read, study:
        shutil.rmtree(next(iter(one.traces.values())).folder)
    monkeypatch.setattr("eelib.tracing.plan.STATES", 0)
    Study(parameters())
    for name, values in before.items():
        assert_close(lens_of(lens, study)[name], values, name)
    study.tokens.loc[0, "token_id"] += 1  # a near tie that was decoded otherwise
    assert lens_of(lens, study) is None and "in near ties" in capsys.readouterr().out


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


def test_quality_where_prompts_were_skipped(parameters, tmp_path, one_line):
    """Outputs are scored against their own references when a prompt did not fit the window."""
    rows = [{"source": "word " * 200, "references": ["x"]}] + PAIRS[:2]
    write_task(tmp_path / "tiny.de-en.jsonl", rows)
    study = Study(parameters())
    made = next(iter(study.traces.values()))
    assert made.sequences["sequence"].tolist() == [1, 2] and made.manifest["skipped"] == 1
    one_line(ParameterError, "example_sequence 0 is not there", lambda: example(made, 0))
    (task,) = study.tasks.values()
    kept = Task.from_prompts(task.prompts[1:], references=task.references[1:])
    assert [*study.quality.values()] == [kept.quality(list(made.sequences["output"]))]


@pytest.mark.parametrize(
    "given, part",
    [
        ({"model": "data/.."}, "'..' is not allowed"),  # it would write beside the folder of results
        ({"results_folder": "a file"}, ("results_folder '", "a file' can't be written")),
        ({"example_sequence": 3}, ("example_sequence 3 is not in ", "the first task; allowed: -1 to 2")),
        ({"beside": "pocket-t5"}, "allowed are entries such as"),
        ({"beside": "./absent on translation/de-en"}, "parameter beside: model folder './absent' does not exist"),
        ({"chat": "yes"}, "no chat template; allowed: auto, no"),
        ({"EELIB_DATA": "nowhere"}, "there is no folder nowhere/papers; EELIB_DATA is 'nowhere'"),
    ],
)
def test_what_can_not_be_is_said_in_one_line_before_decoding(given, part, parameters, tmp_path, monkeypatch, one_line):
    (tmp_path / "a file").touch()
    values = {key: str(tmp_path / value) if "folder" in key else value for key, value in given.items()}
    if data := values.pop("EELIB_DATA", None):
        monkeypatch.setenv("EELIB_DATA", data)
    one_line(ParameterError, part, lambda: Study(parameters(**values)))
    assert not (tmp_path / "runs").exists()


def test_a_task_is_asked_as_the_parameters_say(tmp_path):
    task = write_task(tmp_path / "t.jsonl", [{"article": "A b c.", "highlights": "A."}])
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ messages }}"))
    for chat, wording, in_chat in (("auto", "short", True), ("no", "paper", False)):
        found = prompted(task, model, chat, "auto")
        assert (found.chat, found.prompts) == (in_chat, task.worded(wording).prompts)
    assert prompted(task, model, "auto", "In short: {text}").prompts == ["In short: A b c."]


def test_a_bug_in_a_trace_is_no_parameters_fault(parameters, monkeypatch):
    monkeypatch.setattr(Task, "hash", property(lambda task: np.arange(2) + np.arange(3)))
    with pytest.raises(ValueError, match="could not be broadcast") as caught:
        Study(parameters())
    assert type(caught.value) is ValueError and caught.value.__cause__ is None


def sensible(outputs):
    """Whether a task with these outputs, as token ids without an end token, has sensible text."""
    tokens = pd.DataFrame([{"sequence": i, "token_id": token} for i, ids in enumerate(outputs) for token in ids])
    lengths = pd.DataFrame({"length": list(map(len, outputs))})
    trace = SimpleNamespace(tokens=tokens, sequences=lengths, statistic_rows=lambda: np.ones(len(tokens), dtype=bool))
    study = Study.__new__(Study)
    study.traces, study.model = {"t": trace}, SimpleNamespace(adapter=SimpleNamespace(writes=True))
    return study.sensible["t"]


def test_exit_layers_are_judged_on_sensible_text():
    fresh, loop = list(range(20)), [1, 2, 3, 4] * 5
    assert sensible([fresh] * 30) and not sensible([fresh] * 29 + [[1, 2, 3, 4]])  # 29 outputs are long enough
    assert sensible([fresh] * 30 + [loop] * 7) and not sensible([fresh] * 30 + [loop] * 8)
