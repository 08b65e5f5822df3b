"""The sub-layer section: plain-loop oracles on small arrays, and float64 networks of several families."""

import math
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import plain_runs
import pytest
import torch

import eelib
from checks.tiny_texts import PROMPTS, tokenizer_for
from eelib.models.model import prepare
from eelib.tracing.decode import states_of
from eestudy import claims as papers
from eestudy.old.analysis import sublayers
from eestudy.old.analysis import sublayers_tables as tables
from eestudy.old.figures import sublayers as plots
from eestudy.old.study import study as notebook
from eestudy.parameters import ParameterError, Parameters

NAMES = ("attention", "after_attention", "feed_forward", "block")
TOKENS, LAYERS, K = 14, 5, 10


class FakeTrace:
    """What `sublayers` reads of a trace: random lists of ten out of 40 ids, three sequences, the last tokens EOS."""

    def __init__(self, names=NAMES, seed=0, layers=LAYERS):
        rng = np.random.default_rng(seed)
        self.layers = layers
        sequence = np.repeat([0, 2, 3], [5, 6, 3])
        position = np.concatenate([np.arange(n) for n in (5, 6, 3)])
        self.tokens = pd.DataFrame(
            {
                "sequence": sequence,
                "position": position,
                "group": [f"g{s}" for s in sequence],
                "is_eos": np.isin(np.arange(TOKENS), (4, 10, 13)),
                "text": ["a", " bird", "12", ".", "", "the", " long", "é", "!", "x", "", "?", "yes", ""],
            }
        )
        self.sequences = pd.DataFrame({"sequence": [0, 2, 3]})
        shape = (TOKENS, layers, len(names))
        ids = np.argsort(rng.random((*shape, 40)), axis=-1)[..., :K].astype(np.int32)
        table = {"topk_ids": ids, "probability": rng.random(shape), "final_rank": rng.integers(1, 30, shape)}
        self.statistic_rows = lambda: ~self.tokens["is_eos"].to_numpy()
        self.sites = SimpleNamespace(names=names, rows=np.arange(TOKENS), tokens=self.tokens)
        self.sites = type("Sites", (), {"__getitem__": lambda _, name: table[name], **vars(self.sites)})()
        self.saturation = rng.integers(1, layers + 1, TOKENS)

    def exit_layer(self, definition):
        assert definition == "stable"
        return self.saturation


def kept_rows(made, sequences):
    chosen = list(made.sequences["sequence"])[:sequences]
    return [i for i in range(TOKENS) if made.tokens["sequence"][i] in chosen and not made.tokens["is_eos"][i]]


def test_measures_equal_plain_loops_over_sets():
    made = FakeTrace()
    got = sublayers.readings(made, 2)
    rows = kept_rows(made, 2)
    ids = made.sites["topk_ids"]
    assert len(rows) == 9 and list(got.groups) == [made.tokens["group"][i] for i in rows]
    for n, i in enumerate(rows):
        final = set(ids[i, LAYERS - 1, NAMES.index("block")])
        for layer in range(LAYERS):
            for s, name in enumerate(NAMES):
                here = set(ids[i, layer, s])
                assert got.site("final_overlap", name)[n, layer] == pytest.approx(len(here & final) / 10)
                assert got.site("confidence", name)[n, layer] == made.sites["probability"][i, layer, s]
                assert got.site("in_top", name)[n, layer] == float(made.sites["final_rank"][i, layer, s] <= 10)
                assert got.site("on_top", name)[n, layer] == float(made.sites["final_rank"][i, layer, s] == 1)
                if layer:
                    below = set(ids[i, layer - 1, s])
                    assert got.site("neighbour_overlap", name)[n, layer - 1] == pytest.approx(len(here & below) / 10)


def test_the_other_list_is_never_the_tokens_own():
    made = FakeTrace()
    made.sites["topk_ids"][:] = 10 * np.arange(TOKENS)[:, None, None, None] + np.arange(K)  # no two tokens share an id
    got = sublayers.readings(made, 3)
    assert (got.other_overlap == 0).all() and (got.final_overlap == 1).all()
    made.sites["topk_ids"][:] = np.arange(K)
    assert (sublayers.readings(made, 3).other_overlap == 1).all()


@pytest.mark.parametrize("quantity", ["confidence", "final_overlap", "neighbour_overlap"])
@pytest.mark.parametrize("parallel", [False, True])
def test_contrast_is_stream_minus_the_mean_of_the_two_modules(quantity, parallel):
    names = (
        ("attention", "feed_forward", "block")
        if parallel
        else ("attention", "after_attention", "cross_attention", "feed_forward", "block")
    )
    measures = sublayers.readings(FakeTrace(names), 3)
    assert measures.stream == ("block" if parallel else "after_attention")
    values, groups = sublayers.contrast(measures, quantity)
    array = getattr(measures, quantity)
    layers = array.shape[1] - (parallel and quantity == "final_overlap")
    for n in range(len(groups)):
        total = 0.0
        for layer in range(layers):
            one = dict(zip(names, array[n, layer]))
            total += one[measures.stream] - (one["attention"] + one["feed_forward"]) / 2
        assert values[n] == pytest.approx(total / layers)


@pytest.mark.parametrize("least", [0, 1])
def test_past_saturation_counts_every_token_and_layer_above_it(least):
    made = FakeTrace()
    values, groups = sublayers.past_saturation(sublayers.readings(made, 3), "in_top", sublayers.MODULES, least)
    expected = [
        (
            np.mean([made.sites["final_rank"][i, layer - 1, NAMES.index(m)] <= 10 for m in sublayers.MODULES]),
            made.tokens["group"][i],
        )
        for i in kept_rows(made, 3)
        for layer in range(made.saturation[i] + least, LAYERS + 1)
    ]
    assert values.tolist() == pytest.approx([v for v, _ in expected]) and groups.tolist() == [g for _, g in expected]


def test_curves_are_unweighted_over_tasks_and_ranks_geometric():
    tasks = {"a": sublayers.readings(FakeTrace(seed=1), 3), "b": sublayers.readings(FakeTrace(seed=2), 1)}
    found = sublayers.curve(tasks, "final_overlap", "feed_forward")
    expected = [
        np.mean([m.site("final_overlap", "feed_forward")[:, layer].mean() for m in tasks.values()])
        for layer in range(LAYERS)
    ]
    assert found["estimate"].tolist() == pytest.approx(expected) and found["layer"].tolist() == [1, 2, 3, 4, 5]
    assert (found["low"] <= found["estimate"]).all() and (found["estimate"] <= found["high"]).all()
    assert sublayers.curve(tasks, "neighbour_overlap", "block")["layer"].tolist() == [2, 3, 4, 5]
    ranks = sublayers.curve({"a": tasks["a"]}, "log_rank", "attention")["estimate"]
    raw = tasks["a"].site("rank", "attention")
    geometric = [math.prod(float(v) for v in raw[:, x]) ** (1 / len(raw)) for x in range(LAYERS)]
    assert ranks.tolist() == pytest.approx(geometric)


def test_around_saturation_lines_tokens_up_and_drops_thin_distances():
    made = FakeTrace()
    found = sublayers.around_saturation({"a": sublayers.readings(made, 3)}, "attention", least=6)
    for distance in range(1 - LAYERS, LAYERS):
        hits = [
            made.sites["final_rank"][i, made.saturation[i] + distance - 1, 0] <= 10
            for i in kept_rows(made, 3)
            if 1 <= made.saturation[i] + distance <= LAYERS
        ]
        row = found[found["distance"] == distance]
        assert len(row) == (len(hits) >= 6)
        if len(row):
            assert row["estimate"].iloc[0] == pytest.approx(np.mean(hits))


def test_nothing_to_average_is_nan_not_a_crash():
    made = FakeTrace(("attention", "feed_forward", "block"), layers=1)
    measures = sublayers.readings(made, 3)
    assert sublayers.over_tasks({}, lambda m: sublayers.contrast(m, "confidence")).sequences == 0
    assert len(sublayers.contrast(measures, "final_overlap")[0]) == 0
    found = sublayers.over_tasks({"a": measures}, lambda m: sublayers.contrast(m, "neighbour_overlap"))
    assert math.isnan(found.estimate)
    made.tokens["is_eos"] = True
    empty = sublayers.readings(made, 3)
    assert len(empty.groups) == 0 and tables.site_table({"a": empty})["confidence"].iloc[0].sequences == 0


def test_example_token_follows_its_rule_and_names_what_is_allowed(one_line):
    made = FakeTrace()
    with_letter = [i for i in kept_rows(made, 3) if any(c.isalpha() for c in made.tokens["text"][i])]
    expected = min(with_letter, key=lambda i: (abs(made.saturation[i] - LAYERS / 2), -len(made.tokens["text"][i]), i))
    assert tables.example_token(made, 3) == expected
    assert made.tokens["sequence"][tables.example_token(made, 3, sequence=3)] == 3
    assert tables.example_token(made, 3, 2, 1) == 6
    one_line(ValueError, ["example_sequence 3", "0 to 2"], lambda: tables.example_token(made, 2, 3))
    one_line(ValueError, ["example_position 9", "0 to 5"], lambda: tables.example_token(made, 3, 2, 9))
    one_line(ValueError, "needs an example_sequence", lambda: tables.example_token(made, 3, -1, 2))
    made.tokens["is_eos"] = True
    assert tables.example_token(made, 3) in range(TOKENS)


@pytest.mark.parametrize(
    "saturation, depth, layers",
    [(6, 12, [12, 11, 7, 6, 5]), (12, 12, [12, 11]), (1, 12, [12, 11, 2, 1]), (1, 1, [1]), (2, 2, [2, 1])],
)
def test_shown_layers_are_the_last_and_those_around_saturation(saturation, depth, layers):
    assert tables.shown_layers(saturation, depth) == layers


def test_top_ten_table_is_inert_marks_the_final_token_and_skips_layers():
    rows = tables.hypotheses(FakeTrace(), 3, [5, 2])
    assert [(r["layer"], r["site"]) for r in rows] == [
        (x, s) for x in (5, 2) for s in ("block", "after_attention", "feed_forward", "attention")
    ]
    final = rows[0]["top_10"][3]
    text = plots.hypotheses_table(rows, final, lambda t: f"<script>{t}</script>", "a & b", 5, mark=2)
    assert "<script" not in text and text.count("&lt;script&gt;") == 80 and "a &amp; b" in text
    assert text.count("background:#ffe08a") == sum(r["top_10"].count(final) for r in rows)
    assert text.count("⋮") == 1 and text.index("⋮") < text.index("2 (saturation)")


def test_printed_lists_give_the_overlaps_that_a_reader_counts():
    printed = papers.published("P-table-10")
    found = tables.printed_overlaps(printed).set_index("row")
    assert found.loc["h_ffn 40", ["low", "high", "rank"]].tolist() == [1.0, 1.0, 1]
    assert found.loc["h_attn 40", ["low", "rank"]].tolist() == [0.9, 1]  # _se is not in the last block's list
    assert found.loc["ATTN(h_ffn 39)", ["low", "rank"]].tolist() == [0.0, 0]
    assert found.loc["FFN(h_attn 23)", ["low", "rank"]].tolist() == [0.1, 4]
    assert found.loc["ATTN(h_ffn 22)", ["low", "rank"]].tolist() == [0.3, 2]  # _field, _fields and fields
    assert found.loc["h_attn 20", "rank"] == 2
    assert found.loc["ATTN(h_ffn 38)", ["low", "high"]].tolist() == [0.0, 0.5]  # five of ten can be read
    pairs = tables.printed_neighbours(printed)
    assert set(map(tuple, pairs[["site", "layer"]].to_numpy())) == {
        ("block", 20),
        ("block", 23),
        ("block", 39),
        ("block", 40),
        ("after_attention", 40),
    }
    assert pairs.set_index(["site", "layer"]).loc[("block", 20), "overlap"] == 1.0


def test_published_rows_are_shown_from_the_last_layer_down():
    rows = tables.regrouped(papers.published("P-table-10"))
    assert [r["row"] for r in rows[:5]] == ["h_ffn 40", "h_attn 40", "FFN(h_attn 40)", "ATTN(h_ffn 39)", "h_ffn 39"]
    assert len(rows) == 19 and rows[-1]["layer"] == 19
    assert plots.hypotheses_table(rows, "_fields", str, "", 40).count("⋮") == 2


def test_depth_matching_takes_the_nearest_layer_and_keeps_both_ends():
    assert [tables.depth_matched(x, 40, 12) for x in (1, 19, 20, 23, 38, 40)] == [1, 6, 6, 7, 11, 12]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_modules_and_skip_add_up_at_every_block(family):
    tokenizer = tokenizer_for("causal")
    model = prepare(families.build(family), tokenizer, family, "causal")
    prompt = tokenizer(PROMPTS[1])["input_ids"]
    states, found = states_of(model, [prompt], [prompt[:7]], sites=True)
    assert model.components_error == "" and ("after_attention" in found) == (family != "gpt_neox")
    for layer in range(model.layers):
        total = states[:, layer] + found["attention"][:, layer] + found["feed_forward"][:, layer]
        torch.testing.assert_close(total, states[:, layer + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["block"][:, layer], states[:, layer + 1])
        if family != "gpt_neox":
            skip = states[:, layer] + found["attention"][:, layer]
            torch.testing.assert_close(found["after_attention"][:, layer], skip)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "t5", "bert"])
def test_measures_of_a_trace_equal_a_float64_hook_and_matmul_oracle(family, tmp_path, oracle_of):
    shape = families.FAMILIES[family]
    tokenizer = tokenizer_for(shape.kind)
    model = prepare(families.build(family), tokenizer, family, shape.kind)
    task = eelib.Task.from_prompts(PROMPTS[:3])
    made = eelib.trace(model, task, max_new_tokens=5, folder=tmp_path, sites=3, progress=False)
    got, start = sublayers.readings(made, 3), 0
    for sequence in range(3):
        tokens = made.tokens[made.tokens["sequence"] == sequence]
        keep = made.statistic_rows()[tokens.index]
        emitted = tokens["token_id"].to_numpy()
        prompt = tokenizer(task.prompts[sequence])["input_ids"]
        seen = plain_runs.oracle_run(oracle_of(family), shape, prompt, emitted.tolist())
        count, lists = int(keep.sum()), {}
        rows = slice(start, start + count)
        for name in got.names:
            logits = shape.unembed(oracle_of(family), seen[name]).detach()[keep]
            own = logits.gather(-1, torch.tensor(emitted[keep])[:, None, None].expand(-1, model.layers, 1))
            confidence = logits.softmax(-1).amax(-1)
            np.testing.assert_allclose(got.site("confidence", name)[rows], confidence, rtol=1e-3, atol=1e-6)
            near = ((logits - own).abs() < 1e-3).sum(-1) - 1  # ids so close that float32 may order them otherwise
            rank = (logits > own).sum(-1) + 1
            assert (np.abs(got.site("rank", name)[rows] - rank.numpy()) <= near.numpy()).all()
            lists[name] = logits.topk(11, dim=-1)
        clear = {n: (v.values[..., 9] - v.values[..., 10] > 1e-3).numpy() for n, v in lists.items()}
        ids = {n: v.indices[..., :10].numpy() for n, v in lists.items()}
        for name in got.names:
            for i in range(count):
                for layer in range(model.layers):
                    final, below = ids["block"][i, -1], ids[name][i, layer - 1]
                    if clear[name][i, layer] and clear["block"][i, -1]:
                        shared = len(set(ids[name][i, layer]) & set(final)) / 10
                        assert got.site("final_overlap", name)[start + i, layer] == pytest.approx(shared)
                    if layer and clear[name][i, layer] and clear[name][i, layer - 1]:
                        shared = len(set(ids[name][i, layer]) & set(below)) / 10
                        assert got.site("neighbour_overlap", name)[start + i, layer - 1] == pytest.approx(shared)
        start += count
    assert start == len(got.groups)


def test_a_longer_site_table_in_the_same_trace_changes_nothing(model_of, tmp_path):
    task = eelib.Task.from_prompts(PROMPTS)
    options = dict(max_new_tokens=4, folder=tmp_path, progress=False)
    few = sublayers.readings(eelib.trace(model_of("llama"), task, sites=2, **options), 2)
    many = sublayers.readings(eelib.trace(model_of("llama"), task, sites=5, **options), 2)
    np.testing.assert_array_equal(few.rank, many.rank)
    np.testing.assert_array_equal(few.final_overlap, many.final_overlap)


def test_a_model_without_known_sub_layers_stops_the_notebook_in_one_line(monkeypatch, tmp_path, one_line):
    tokenizer = tokenizer_for("causal")
    model = prepare(families.build("gpt2"), tokenizer, "gpt2", "causal")
    model.components, model.components_error = (
        [],
        "gpt2: no two or three modules of transformer.h.0 add up to its output",
    )
    monkeypatch.setattr(notebook, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(notebook, "task_names", lambda _: ["prompts"])
    monkeypatch.setattr(notebook, "load_task", lambda *_, **__: eelib.Task.from_prompts(PROMPTS[:2]))
    given = dict(
        model="gpt2",
        tasks="prompts",
        limit=2,
        max_new_tokens=3,
        batch_size=0,
        dtype="float32",
        device="cpu",
        seed=0,
        runs_folder=str(tmp_path),
        results_folder=str(tmp_path),
    )
    one_line(ParameterError, "add up to its output", lambda: notebook.Study(Parameters(given), sites=2))


def test_plots_draw_every_site_once_with_labelled_axes():
    tasks = {"a": sublayers.readings(FakeTrace(), 3)}
    fig = plots.curves_figure({q: {s: sublayers.curve(tasks, q, s) for s in NAMES} for q in ("confidence", "log_rank")})
    assert [len([x for x in axis.lines if not x.get_label().startswith("_")]) for axis in fig.axes] == [4, 4]
    assert all(axis.get_xlabel() and axis.get_ylabel() and axis.get_title() for axis in fig.axes)
    fig = plots.around_figure({s: sublayers.around_saturation(tasks, s, least=1) for s in NAMES}, 0.5)
    assert fig.axes[0].get_xlabel() and fig.axes[0].get_ylabel()
    thin = sublayers.around_saturation(tasks, "block", least=TOKENS + 1)
    assert thin.empty and plots.around_figure({"block": thin}, 0.5).axes
