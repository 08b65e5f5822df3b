"""The encoder of an encoder-decoder, read in place."""

import families
import pytest
import torch

import eelib
from eelib.common.tolerances import assert_as_near
from eelib.tracing.decode import states_of


@pytest.mark.parametrize("name", families.SEQ2SEQ)
def test_encoder_of_an_encoder_decoder(name, folder_of, plain_of, oracle_of):
    """Each position of the source, read in place: the encoder's own last state through the decoder's head."""
    model = eelib.load_model(str(folder_of(name)), device="cpu", stack="encoder")
    ids = model.encode(["Wo ist das Buch?"])[0]
    states, sites = states_of(model, [ids], [ids], sites=True)
    assert (model.kind, model.layers) == ("masked", 2)
    assert set(sites) == {"attention", "after_attention", "feed_forward", "block"}

    @torch.no_grad()
    def by_hand(network):
        """(states of layers 0 and 1, logits of the last)."""
        given = network.get_encoder()(input_ids=torch.tensor([ids]), output_hidden_states=True)
        scale = network.config.d_model**-0.5 if name == "t5_tied" else 1.0
        logits = network.get_output_embeddings()(given.last_hidden_state[0] * scale)
        return torch.stack(given.hidden_states[:2], 2)[0], logits + getattr(network, "final_logits_bias", 0.0)

    (plain, plain_logits), (exact, exact_logits) = by_hand(plain_of(name)), by_hand(oracle_of(name))
    assert_as_near(states[:, :2], plain, exact, "states")
    assert_as_near(model.unembed(states[:, -1]), plain_logits, exact_logits, "logits")


def test_stack_is_checked(folder_of, one_line):
    one_line(
        ValueError, ("'middle'", "decoder, encoder"), lambda: eelib.load_model(str(folder_of("t5")), stack="middle")
    )
    one_line(ValueError, "causal", lambda: eelib.load_model(str(folder_of("llama")), stack="encoder"))
