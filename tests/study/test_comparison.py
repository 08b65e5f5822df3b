"""Several models on one page: the parameter that names them, and what is refused before anything is decoded."""

import os

import pytest
from transformers import AutoConfig

from eestudy.old.study.comparison import (
    check_pairs,
    check_there,
    config_of,
    objectives,
    pairs_on_tasks,
)
from eestudy.parameters import ParameterError


def test_a_configuration_that_never_ends_is_not_waited_for(tmp_path, one_line):
    os.mkfifo(tmp_path / "config.json")
    one_line(ParameterError, ("parameter after", "config.json", "pipe"), lambda: config_of("after", str(tmp_path)))


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
