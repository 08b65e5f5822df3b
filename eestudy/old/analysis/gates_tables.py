"""Tables and words of the page on gates, and what it keeps."""

from collections.abc import Mapping, Sequence

import pandas as pd

from eestudy.old.analysis.gate_rules import FIXED, FREE, OF_P, Asked, label, rules
from eestudy.old.analysis.gates import Left, Outcomes, best_gate, calibrated_layers, mean, outcome_table, outcomes
from eestudy.old.analysis.joint import Pair
from eestudy.old.statistics.interval import Interval, told
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

SHOWN_OF_OTHERS = (*OF_P, "softmax_difference", FIXED)  # none needs states, so no model runs again

# ---- of other pages, too


def trained_in_words(missing: Sequence[tuple[Study, Mapping[str, str]]]) -> str:
    """Which trained gates each of some models is `missing`, why, and the command that trains them."""
    whole = [study.model.name for study, gates in missing if not gates]
    said = [f"{' and '.join(whole)} {'has' if len(whole) == 1 else 'have'} all three trained gates."] if whole else []
    for study, gates in missing:
        if not gates:
            continue
        name = study.model.name
        if not study.model.adapter.writes:
            said.append(f"Trained gates learn from the tokens that a model writes, and {name} writes none.")
            continue
        command = f"python -m recipes gates --model {study.parameters.model} --corpora DIR"
        said.append(f"Trained gates that {name} does not have: {', '.join(map(label, gates))}; they are trained with: ")
        said[-1] += f"{command}."
        said += [f"A file was refused: {why}." for why in gates.values() if why]
    return " ".join(said)


def beating_fixed(gains: Mapping[str, Interval]) -> str:
    """Which gates beat a fixed layer, by most points and by fewest, and which lose to it; begins in a sentence."""
    gains = {gate: gain for gate, gain in gains.items() if gain.known}
    if not gains:
        return "nothing can be compared with a fixed layer here."
    better, worse = (
        [gate for gate, gain in gains.items() if gain.side("better", "worse", "neither") == side]
        for side in ("better", "worse")
    )
    most, fewest = (choose(gains, key=lambda gate: gains[gate].estimate) for choose in (max, min))
    every = f"all {len(gains)} gates" if len(better) == len(gains) > 1 else ", ".join(better)
    return (
        f"better than a fixed layer with the whole interval: {every or 'none'}; worse: {', '.join(worse) or 'none'}. "
        f"The largest gain is that of {most}, {told(gains[most], ' points')}, the smallest that of {fewest}, "
        f"{told(gains[fewest], ' points')}."
    )


# ---- of the pair


def keep(results: Results, pair: Pair, states: Mapping[str, Outcomes], table: pd.DataFrame) -> None:
    """Put the outcomes into a notebook's results, per task and over the tasks, and what the prose says of them."""
    p = pair.before.parameters
    results.say("least_quality", 100 * p.least_quality)
    results.say("minimum_layer", p.minimum_layer)
    results.say("schedule_tokens", p.max_new_tokens)
    results.say("name_before", pair.before.model.name)
    results.say("name_after", pair.after.model.name)
    for state, found in states.items():
        for gate, of_tasks in found.items():
            for task, left in of_tasks.items():
                key = f"{gate}_{state}"
                results.put(task, f"{key}_threshold", left.threshold)
                results.put(task, f"{key}_layers", float(left.exits.mean()))
                results.put(task, f"{key}_agreement", float(left.agrees.mean()))
                results.put(task, f"{key}_quality_kept", left.kept)
    for row in table.to_dict("records"):
        for column in ("exit layer", "distance (% of L)", "layers saved (%)", "FLOP speed-up"):
            results.keep(f"{column} {row['gate']} {row['state']}", row[column])
    for state, found in states.items():
        if (best := best_free(found)) is not None:
            results.keep(f"saved {state}", saved(found[best], pair.seed))
    results.tell("outcome_words", outcome_in_words(pair, states))


def best_free(found: Outcomes) -> str | None:
    """The gate that runs least on the calibration part, fixed layers and FREE's left out; None where none is learnt."""
    gates = [name for name in found if name not in (FIXED, FREE)]
    return best_gate(found, gates) if any(found[name] for name in gates) else None


def saved(left: Mapping[str, Left], seed: int) -> Interval:
    """Share of the layers that a gate saves on the report part, unweighted mean over tasks."""
    return mean(left, lambda one: one.saved, seed)


def outcome_in_words(pair: Pair, states: Mapping[str, Outcomes]) -> str:
    """The best gate of each state, what it saves, and what a fixed layer saves; and which tasks are not learnt."""
    missed = ", ".join(task for task in pair.before.traces if not pair.learnt(task))
    if not pair.tasks:
        return f"Not learnt before and after: {missed}. So nothing is calibrated here."
    said = []
    for state, found in states.items():
        gate = best_free(found)
        if gate is None or calibrated_layers(found[gate]) >= next(iter(found[gate].values())).layers:
            said.append(f"{state.capitalize()} joint optimization no gate that keeps the quality leaves early at all.")
            continue
        own, fixed = (saved(found[name], pair.seed).percent for name in (gate, FIXED))
        said.append(
            f"{state.capitalize()} joint optimization the gate that runs least on the calibration part is "
            f"{label(gate)}; on the other part it saves {told(own, '%')} of the layers, a fixed "
            f"layer {fixed.estimate:.1f}%."
        )
    if missed:
        said.append(f"Not learnt before and after, and left out: {missed}.")
    return " ".join(said)


def fixed_in_words(table: pd.DataFrame) -> str:
    """Which gates beat a fixed layer, at equal layers and at equal cost, by `gates.against_bounds`."""
    said = []
    for state, rows in table.groupby("state", sort=False):
        said.append(
            f"{str(state).capitalize()} joint optimization, {beating_fixed(dict(zip(rows['gate'], rows['points'])))}"
        )
        known, dear = ([row for row in rows.to_dict("records") if row["cost"].known == has] for has in (True, False))
        if known:
            better, worse = (
                ", ".join(row["gate"] for row in known if row["cost"].side("better", "worse", "") == side) or "none"
                for side in ("better", "worse")
            )
            said.append(f"At equal cost, each over a range of its own, surely better: {better}; surely worse: {worse}.")
        if dear:
            said.append(f"At no threshold cheaper than full depth: {', '.join(row['gate'] for row in dear)}.")
    return " ".join(said) or "Nothing is learnt, so no curves are drawn."


# ---- of further pairs


def other_tables(pairs: Sequence[Pair], least: float) -> list[tuple[Pair, pd.DataFrame]]:
    """(pair, its `outcome_table`) of some gates and the fixed layer, where a pair has learnt a task."""
    found = []
    for pair in pairs:
        if pair.tasks:
            p = pair.before.parameters
            chosen = {name: rule for name, rule in rules(p.minimum_layer).items() if name in SHOWN_OF_OTHERS}
            states = {s: Asked(study, pair.tasks, chosen, p.calibration_share) for s, study in pair.states.items()}
            outcome = {state: outcomes(of, least, SHOWN_OF_OTHERS) for state, of in states.items()}
            found.append((pair, outcome_table(outcome, pair.seed)))
    return found


def others_table(others: Sequence[tuple[Pair, pd.DataFrame]]) -> pd.DataFrame:
    """The tables of several pairs, with the models in front, without what their figures show."""
    tables = []
    for pair, table in others:
        table = table.drop(columns=["state", "optimal", "layers saved (%)"])
        table.insert(0, "model", [study.model.name for study in pair.states.values() for _ in SHOWN_OF_OTHERS])
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def others_in_words(pairs: Sequence[Pair], others: Sequence[tuple[Pair, pd.DataFrame]]) -> str:
    """How confidence's distance to the optimum changes in each further pair, and which have learnt nothing."""
    said = []
    for pair, table in others:
        rows = table[table["gate"] == OF_P[0]]["distance (% of L)"]
        old, new = (told(interval, "%") for interval in rows)
        said.append(
            f"From {pair.before.model.name} to {pair.after.model.name} it goes from {old} to {new} of the depth."
        )
    if said:
        said.insert(0, f"The distance of {OF_P[0]} to the optimal layer, which P-G1 is about, in the further pairs:")
    names = [f"{pair.before.model.name} and {pair.after.model.name}" for pair in pairs if not pair.tasks]
    if names:
        said.append(f"Not learnt before and after, and left out: {'; '.join(names)}.")
    return " ".join(said) or "No further pair is part of this run."
