"""Classifiers: labels of every layer at the one position that the network reads, whichever that is."""

import families
import pytest
import torch
from families import FAMILIES
from transformers import BartForSequenceClassification, BertForSequenceClassification

import eelib
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.common.tolerances import assert_as_near
from eelib.models.model import prepare
from eelib.tracing.decode import states_of


@pytest.mark.parametrize("name", families.CLASSIFIERS)
def test_classifier_is_read_at_its_one_position(name, tmp_path):
    """Labels of every layer: the pooler and head written out by hand, at the position that the network reads."""
    family, position = families.CLASSIFIERS[name]
    model = eelib.load_model(str(families.save(name, tmp_path)), device="cpu")
    plain, oracle = families.build(name), families.build(name).double()
    ids = model.encode(PROMPTS)[1]
    states, sites = states_of(model, [ids], [ids], sites=True)
    assert (model.kind, model.vocab_size, model.read_at(ids)) == ("classifier", 3, position % len(ids))
    assert states.shape == (1, 4, 32) and sites["block"].shape == (1, 3, 32)
    mine, exact = (n(input_ids=torch.tensor([ids]), output_hidden_states=True) for n in (plain, oracle))
    assert_as_near(model.unembed(states[:, -1]), mine.logits, exact.logits, "the network's own")
    for layer in range(3):
        by_hand, own = mine.hidden_states[layer][0, position][None], exact.hidden_states[layer][0, position][None]
        assert_as_near(states[:, layer], by_hand, own, f"state of layer {layer}")
        labels = family.unembed(plain, by_hand), family.unembed(oracle, own)
        assert_as_near(model.unembed(states[:, layer]), *labels, f"labels of layer {layer}")


def test_end_token_is_where_bart_classifies(one_line):
    config = FAMILIES["bart"].config(vocab_size=300, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config.num_labels = 3
    torch.manual_seed(0)
    network = BartForSequenceClassification(config).eval()
    model = prepare(network, tokenizer_for("seq2seq"), "bart", "classifier")
    assert model.read_at([9, 8, 1, 7]) == 2 and model.components[0].cross_attention is not None
    one_line(ValueError, "end token", lambda: model.read_at([9, 8]))


def test_regression_head_is_refused(one_line):
    config = families.CLASSIFIERS["bert_labels"][0].config(vocab_size=300)
    config.num_labels = 1
    one_line(
        ValueError,
        ("odd", "regression"),
        lambda: prepare(BertForSequenceClassification(config).eval(), tokenizer_for("masked"), "odd", "classifier"),
    )
