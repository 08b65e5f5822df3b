"""Tables and words of the section on keys and values that skipped layers lack, beside P's Tables 6 and 11."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from eelib.exits.decoding.gate_runner import FULL_DEPTH_TOKENS
from eestudy.claims import as_depth, published
from eestudy.markup.text import visible
from eestudy.old.analysis import keys_values as kv
from eestudy.old.analysis.gate_rules import label
from eestudy.old.analysis.keys_values import CLEAN, COPY, PROJECT, WAYS, Side, Way
from eestudy.old.statistics.interval import Interval, told
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.results import Results

P_LAYERS = 32  # of Llama-2-Chat-7B
P_SENTENCES = {"short": "P-table-6", "long": "P-table-11"}
P_WAYS = {"copy": COPY, "recompute": PROJECT}
SHORTEST, LONGEST = 8, 20  # tokens of the outputs that serve as examples


def way_table(sides: Sequence[Side]) -> pd.DataFrame:
    """A row per model and way: exit layer, agreement, unchanged outputs, who is to blame, loops; percent. A model that
    has learnt no task has none.
    """
    rows = []
    for side in (side for side in sides if side.learnt):
        rows.append(
            {
                "model": side.name,
                "leaves by": "no exit",
                "keys and values": "–",
                "loops (%)": attempt(lambda: kv.loops(side, None)).percent,
            }
        )
        for way in WAYS:
            rows.append(
                {
                    "model": side.name,
                    "leaves by": way.who,
                    "keys and values": way.keys,
                    "exit layer / L (%)": attempt(lambda: kv.exit_depth(side, way)).percent,
                    "agrees (%)": attempt(lambda: kv.agreement(side, way)).percent,
                    "outputs unchanged (%)": attempt(lambda: kv.unchanged(side, way)).percent,
                    "parted by the gate (%)": attempt(lambda: kv.blamed(side, way, "gate")).percent,
                    "parted by the keys (%)": attempt(lambda: kv.blamed(side, way, "keys")).percent,
                    "loops (%)": attempt(lambda: kv.loops(side, way)).percent,
                }
            )
    return pd.DataFrame(rows)


def length_table(sides: Sequence[Side]) -> pd.DataFrame:
    """A row per model and way: change of quality in all, the shorter and the longer outputs; slope of agreement. A
    model without a learnt task has none.
    """
    return pd.DataFrame(
        {
            "model": side.name,
            "leaves by": way.who,
            "keys and values": way.keys,
            "quality, all": attempt(lambda: kv.quality_change(side, way)),
            "quality, shorter half": attempt(lambda: kv.quality_change(side, way, 0)),
            "quality, longer half": attempt(lambda: kv.quality_change(side, way, 1)),
            "agreement per 10 tokens of length (points)": attempt(lambda: kv.length_slope(side, way)).scaled(1000),
        }
        for side in sides
        if side.learnt
        for way in WAYS
    )


def beside_p(sides: Sequence[Side]) -> pd.DataFrame:
    """Mean depth of P's two sentences (Tables 6 and 11), share of 32 layers after the first tokens, beside this run."""
    rows = []
    for jointly in (False, True):
        side = sides[-1] if jointly else sides[0]
        for keys, way in P_WAYS.items():
            row: dict = {"jointly optimized": "yes" if jointly else "no", "keys and values": way.keys}
            for title, table in P_SENTENCES.items():
                found = published(table)
                found = found[(found["kv_policy"] == keys) & (found["jointly_optimized"] == jointly)]
                (layers,) = found["exit_layers"]
                base = published(table).attrs["columns"]["exit_layers"]["layer_base"]
                depths = [as_depth(layer, base)[0] for layer in layers[FULL_DEPTH_TOKENS:]]
                row[f"P, {title} sentence (%)"] = 100 * np.mean(depths) / P_LAYERS
            if not jointly or len(sides) > 1:
                row["this run (%)"] = attempt(lambda: kv.exit_depth(side, way)).percent
                row["model"] = side.name
            rows.append(row)
    return pd.DataFrame(rows)


# ---- examples in the form of P's Table 6


def example(side: Side) -> tuple[str, int] | None:
    """(task, sequence) of a short output that copying changes, else of any; None where nothing is learnt."""
    best: tuple[tuple, tuple[str, int]] | None = None
    for task in side.learnt:
        frame = side.beside[COPY][task]
        for number, part in frame.groupby("sequence"):
            fits = SHORTEST <= len(part) <= LONGEST
            other = side.study.tasks[task].kind != "translation"  # P's examples are translations
            rank = (other, not fits, bool(part["agrees"].all()), len(part), task)
            if best is None or rank < best[0]:
                best = (rank, (task, int(number)))
    return best and best[1]


def example_table(sides: Sequence[Side], task: str, sequence: int) -> pd.DataFrame:
    """A row per model and way, first of full decoding: the output, and the exit layer of each of its tokens."""
    rows = []
    for side in sides:
        full = side.full[task]
        ids = full.loc[full["sequence"] == sequence, "token_id"]
        text = side.study.traces[task].sequences.set_index("sequence")["output"][sequence]
        rows.append(example_row(side, "no exit", text, [side.depth] * len(ids)))
        order = full["sequence"].drop_duplicates().tolist().index(sequence)
        for way in (COPY, PROJECT, CLEAN):
            frame = side.tokens[way][task]
            layers = frame.loc[frame["sequence"] == sequence, "exit_layer"].tolist()
            rows.append(example_row(side, way.label, side.outputs[way][task][order], layers))
    return pd.DataFrame(rows)


def example_row(side: Side, label: str, text: str, layers: list[int]) -> dict[str, str]:
    """One row of `example_table`."""
    return {
        "model": side.name,
        "leaves by, keys and values": label,
        "output": visible(text),
        f"exit layers, of {side.depth}": " ".join(map(str, layers)),
    }


# ---- words


def models_in_words(sides: Sequence[Side]) -> str:
    """Which models are compared, on how many outputs, and what they have not learnt."""
    said = []
    for side in sides:
        counts = " and ".join(f"{side.full[task]['sequence'].nunique()} of {task}" for task in side.learnt)
        said.append(f"{side.name}'s first outputs, {counts or 'of no task, for none is learnt'}.")
        if missed := [task for task in side.full if not side.study.learnt[task]]:
            said.append(f"Not learnt by {side.name}, and left out: {', '.join(missed)}.")
    if len(sides) == 1:
        said.append("No model trained further is part of this run, so nothing is said of joint optimization.")
    return " ".join(said)


def policies_in_words(side: Side) -> str:
    """How projecting compares with copying, under the best layer and under the gate."""
    best = attempt(lambda: kv.agreement_difference(side, PROJECT, COPY)).percent
    gate = attempt(lambda: kv.agreement_difference(side, Way(kv.GATE, "project"), Way(kv.GATE, "copy"))).percent
    if not best.known:
        return f"Nothing can be compared for {side.name}: no task is learnt."
    with_best, with_gate = (one.side("more", "fewer", "not surely more or fewer") for one in (best, gate))
    return (
        f"Of {side.name}, when skipped keys and values are projected and not copied, outputs keep {with_best} of full "
        f"decoding's tokens with the best layer, by {told(best, ' points')}, and {with_gate} with the gate, by "
        f"{told(gate, ' points')}."
    )


def blame_in_words(side: Side) -> str:
    """Of the outputs that the gate's decoding with copied keys changes: how many the gate alone would have changed."""
    way = Way(kv.GATE, "copy")
    gate, keys = (attempt(lambda: kv.blamed(side, way, who)).percent for who in ("gate", "keys"))
    if not gate.known:
        return ""
    return (
        f"Of {side.name}'s outputs, gate and copied keys change {gate.estimate + keys.estimate:.0f}%. "
        f"Of all, {gate.estimate:.0f}% the gate would have changed by then with true keys; {keys.estimate:.0f}% "
        "fell to the keys."
    )


def constant_in_words(side: Side) -> str:
    """Whether a longer output agrees less because each further token is riskier, or only because there are more."""
    table = kv.by_position(side, [COPY], where="first")
    left = table[table["bin"] > 0]
    if len(left) < 2:
        return ""
    first, last = (Interval(*left.iloc[i][list(Interval._fields)]) for i in (0, -1))
    apart = last.low > first.high or first.low > last.high
    risk = [100 * (1 - one.estimate) for one in (first, last)]
    return (
        f"A longer output has more places to go wrong, so it agrees less even if every place is equally risky. "
        f"Of {side.name}'s tokens before which nothing differed yet, copying makes {risk[0]:.0f}% differ in the first "
        f"positions after the fourth token and {risk[1]:.0f}% in the last that are reached: the risk "
        f"{'moves' if apart else 'does not surely move'} along the output."
    )


def verified_in_words(sides: Sequence[Side]) -> str:
    """Whether verified decoding gave full decoding's outputs, as it must but for rounding."""
    said = []
    for side in sides:
        same = attempt(lambda: kv.unchanged(side, Way(kv.GATE, "verified"))).percent
        if same.known:
            said.append(f"{same.estimate:.0f}% of {side.name}'s outputs")
    return f"Verified decoding gave full decoding's very tokens in {' and '.join(said)}." if said else ""


def keep(results: Results, sides: Sequence[Side], ways: pd.DataFrame, lengths: pd.DataFrame) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    for table in (ways, lengths):
        for row in table.to_dict("records"):
            name = f"{row['model']}, {row['leaves by']}, {row.get('keys and values')}"
            for column, value in row.items():
                if isinstance(value, Interval) and value.known:
                    results.keep(f"{column}, {name}", value)
    judged = sides[-1]
    results.say("gate_name", label(judged.study.parameters.gate))
    results.tell("models_words", models_in_words(sides))
    results.tell("policies_words", " ".join(policies_in_words(side) for side in sides))
    results.tell("blame_words", " ".join(blame_in_words(side) for side in sides))
    results.tell("constant_words", attempt(lambda: constant_in_words(judged), ""))
    results.tell("verified_words", verified_in_words(sides))
