"""Several models on one page: the parameter that names them, and what is refused before anything is decoded."""

import os

import families
import pytest
from studies_made import values_in
from transformers import AutoConfig

from eestudy.old.study.comparison import (
    check_pairs,
    check_there,
    config_of,
    models_beside,
    objectives,
    pairs_on_tasks,
    timed_studies,
)
from eestudy.old.study.study import Study
from eestudy.parameters import ParameterError, Parameters


def test_a_configuration_that_never_ends_is_not_waited_for(tmp_path, one_line):
    os.mkfifo(tmp_path / "config.json")
    one_line(ParameterError, ("parameter after", "config.json", "pipe"), lambda: config_of("after", str(tmp_path)))


def test_pairs_of_checkpoints_and_tasks():
    parse = models_beside
    assert parse("") == parse(" ; ") == []
    assert parse("a/b on translation/*;c on translation/de-en,translation/en-de ;") == [
        ("a/b", "translation/*"),
        ("c", "translation/de-en,translation/en-de"),
    ]


@pytest.mark.parametrize(
    "text, parts",
    [
        ("pocket-t5", ("'pocket-t5'", "pocket-t5 on translation/*")),
        ("pocket-t5 on ", "'pocket-t5 on'"),
        (" on translation/*", "'on translation/*'"),
        ("a on nothing/x", ("beside, a", "'nothing/x'")),
        ("a on translation/de-en; a on translation/en-de", ("a twice", "commas")),
    ],
)
def test_a_bad_pair_is_refused_in_one_line(text, parts, one_line):
    one_line(ParameterError, parts, lambda: models_beside(text))


@pytest.fixture(scope="module")
def values(folder_of, tmp_path_factory):
    """Parameters of a page on a tiny gpt2 with two tiny models beside it."""
    return values_in(tmp_path_factory.mktemp("studies"), folder_of)


def test_the_main_model_comes_first_and_is_not_beside_itself(values, folder_of):
    found = timed_studies(Parameters(values))
    assert [study.model.name for study in found] == ["gpt2", "t5", "bert_labels"]
    twice = values | {"beside": f"{folder_of('gpt2')} on {values['tasks']}"}
    assert len(timed_studies(Parameters(twice))) == 1
    by_another_way = f"{folder_of('gpt2')}/../gpt2"
    assert len(timed_studies(Parameters(values | {"beside": f"{by_another_way} on {values['tasks']}"}))) == 1


@pytest.mark.parametrize(
    "beside, part",
    [
        ("{runs}/absent on translation/de-en", "absent"),
        ("no-such-model on translation/de-en", "'no-such-model'"),
    ],
)
def test_a_missing_checkpoint_is_refused_before_anything_is_decoded(beside, part, values, tmp_path, one_line):
    changed = values | {"runs_folder": str(tmp_path / "runs"), "beside": beside.format(runs=tmp_path)}
    one_line(ParameterError, part, lambda: timed_studies(Parameters(changed)))
    assert not (tmp_path / "runs").exists()


def test_two_checkpoints_of_one_name_are_refused(values, tmp_path, one_line):
    families.save("t5", tmp_path / "gpt2")
    changed = values | {"beside": f"{tmp_path / 'gpt2'} on {values['tasks']}", "runs_folder": str(tmp_path / "runs")}
    one_line(ParameterError, "shown as gpt2", lambda: timed_studies(Parameters(changed)))
    assert not (tmp_path / "runs").exists()


def test_a_template_replaces_the_prompt_of_the_pages_own_model(values, one_line):
    study = Study(Parameters(values | {"template": "de > en: {source}"}))
    assert study.tasks[values["tasks"]].prompts == [f"de > en: Satz {i}." for i in range(6)]
    one_line(ParameterError, ("template", "{source}"), lambda: Study(Parameters(values | {"template": "no place"})))
    own, *beside = timed_studies(Parameters(values | {"template": "de > en: {source}"}))
    assert own.parameters.template and not any(study.parameters.template for study in beside)


def test_what_the_models_were_trained_for(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "card.json").write_text('{"objective": "a loss on every layer"}')
    said = objectives([str(tmp_path / "made"), "some/other", "third"])
    assert said == "made: a loss on every layer. other, third: what its makers say, since there is no card."
    assert objectives([]) == "None is part of this run."


def test_another_architecture_is_refused(folder_of, tmp_path):
    llama, gpt2 = str(folder_of("llama")), str(folder_of("gpt2"))
    check_pairs("after", [(llama, llama)])
    with pytest.raises(ParameterError, match=f"parameter after: {llama} and {gpt2} differ in architectures"):
        check_pairs("after", [(llama, gpt2)])
    deeper = tmp_path / "t5"
    config = AutoConfig.from_pretrained(folder_of("t5"))
    config.num_decoder_layers += 1
    config.save_pretrained(deeper)
    with pytest.raises(ParameterError, match="num_decoder_layers"):
        check_pairs("after", [(str(folder_of("t5")), str(deeper))])
    with pytest.raises(ParameterError, match="architectures"):
        check_pairs("after", [(str(folder_of("bert")), str(folder_of("bert_labels")))])
    with pytest.raises(ParameterError, match="parameter others: model 'pocket-none' could not be loaded"):
        check_pairs("others", [(llama, "pocket-none")])
    with pytest.raises(ParameterError, match="parameter model: model 'pocket-none' could not be loaded"):
        check_pairs("after", [("pocket-none", llama)])


def test_other_pairs_are_read():
    assert pairs_on_tasks("others", "") == []
    assert pairs_on_tasks("others", "a > b on translation/*; c>d on classification/sst2 ;") == [
        ("a", "b", "translation/*"),
        ("c", "d", "classification/sst2"),
    ]
    with pytest.raises(ParameterError, match="parameter others, a > b: .*translation/de-enn"):
        pairs_on_tasks("others", "a > b on translation/de-enn")
    for wrong in ("a", "a > b", "a on translation/*", "> b on translation/*"):
        with pytest.raises(ParameterError, match="parameter others holds"):
            pairs_on_tasks("others", wrong)


def test_a_model_that_is_not_there_is_refused_with_its_parameter(one_line):
    one_line(
        ParameterError, "parameter weighted: model 'no-such-model'", lambda: check_there("weighted", "no-such-model")
    )
    check_there("weighted", " ")


def test_a_pair_without_a_second_model_is_refused_with_its_parameter():
    with pytest.raises(ParameterError, match="parameter after: model is empty"):
        check_pairs("after", [("pocket-llama", "")])
