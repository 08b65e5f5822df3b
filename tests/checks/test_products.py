"""The check of few-row products: it finds tokens that change, and writes a row for each goal."""

import json

import families
import pytest
import torch

import eelib
from checks import products


def test_tokens_that_change_are_counted_with_their_margins(model_of, tmp_path):
    plain, prompts = model_of("llama"), [[5, 6, 7], [8, 9]]
    (row,) = products.token_rows(plain, plain, prompts, 4)
    assert row["met"] and row["compared"] == 8 and not row["differences"]
    other = eelib.load_model(str(families.save("llama", tmp_path / "other", seed=1)), device="cpu")
    (row,) = products.token_rows(other, plain, prompts, 4)
    assert not row["met"] and row["differences"] == 2 and row["measured"] == 2 and all(m > 0 for m in row["margins"])


def test_margin_is_that_of_the_next_tokens_logits(model_of):
    model = model_of("llama")
    with torch.no_grad():
        logits = model.network(torch.tensor([[5, 6, 7, 30]])).logits[0, -1]
    assert products.margin(model, [5, 6], [7, 30], 40, 41) == pytest.approx(float(logits[41] - logits[40]), rel=1e-3)


def test_a_row_for_each_goal(folder_of, tmp_path, capsys):
    asked = ["--threads", "1", "--repeats", "1", "--new-tokens", "2", "--prompts", "1"]
    with pytest.raises(SystemExit) as end:
        products.main([str(folder_of("llama")), *asked, "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    tokens, *speeds = found["rows"]
    assert found["instructions"] and tokens["compared"] == 2 and tokens["met"]
    assert [row["bound"] for row in speeds] == list(products.GOALS.values())
    for row in speeds:
        assert row["measured"] == round(row["generate_took"][0] / row["ours_took"][0], 2)
        assert row["met"] == (row["measured"] >= row["bound"])
    assert end.value.code == (0 if all(row["met"] for row in found["rows"]) else 1)


def test_bad_arguments_are_refused_in_one_line(capsys):
    for wrong in (["--threads", "a"], ["--threads", "0"], ["--repeats", "-1"]):
        with pytest.raises(SystemExit) as end:
            products.main(wrong)
        assert end.value.code == 2
