"""Tables and words of the section on what early exit buys in time."""

import pandas as pd

from eelib.tasks.task import Task
from eestudy.old.analysis.gate_rules import label
from eestudy.old.analysis.speed import LIBRARY, PLAIN, Race, draft_table, faster, forecasts, rows_of
from eestudy.old.statistics.interval import Interval, told
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.results import Results

QUALITY = 98.0  # percent of plain decoding's score and tokens that a lossy way has to keep to count as good as plain


def race_table(found: Race) -> pd.DataFrame:
    """A row per batch size and way: time, speed-up over plain decoding measured and forecast, depth, what was kept."""
    rows = []
    for size in found.sizes:
        scores = {name: score(found, texts) for (name, batch), texts in found.outputs.items() if batch == size}
        ways = {way.name: way for way in found.ways}
        for name in (PLAIN, LIBRARY, *(way.name for way in found.ways[1:])):
            own = rows_of(found, name, size)
            if own.empty:
                continue
            ours = name in ways
            rows.append(
                {
                    "batch": size,
                    "way": name if ours else "transformers' generate",
                    "tokens per second": own["tokens"].sum() / own["seconds"].sum(),
                    "times as fast": attempt(lambda: faster(found, name, size)),
                    "forecast": forecasts(found, ways[name], size) if ours else float("nan"),
                    "exit layer": own["layers"].sum() / own["tokens"].sum() if ours else float("nan"),
                    "head reads per token": own["heads"].sum() / own["tokens"].sum() if ours else float("nan"),
                    "tokens that are plain's (%)": 100 * own["agrees"].sum() / own["of"].sum(),
                    score_name(found): scores.get(name, float("nan")),
                }
            )
    return pd.DataFrame(rows)


def score(found: Race, texts: list[str]) -> float:
    """The task's first score; NaN without references."""
    return next(iter(asked_of(found).quality(texts).values()), float("nan"))


def score_name(found: Race) -> str:
    """What it is called."""
    return next(iter(asked_of(found).quality([""] * len(found.numbers))), "score")


def asked_of(found: Race) -> Task:
    """The prompts that were timed."""
    return found.study.tasks[found.task].pick(found.numbers)


def drafts(found: Race) -> pd.DataFrame:
    """Drafts through each layer, as forecast; of the one that was timed, what came of it."""
    table = draft_table(found.costs, found.study.traces[found.task], found.numbers)
    timed = next((way for way in found.ways if way.draft is not None), None)
    if timed is not None and timed.rule is not None and timed.rule.exit_layers:
        own = rows_of(found, timed.name, 1)
        chosen = table["layer"] == timed.rule.exit_layers[0]
        table.loc[chosen, "measured"] = own["seconds_plain"].sum() / own["seconds"].sum()
        table.loc[chosen, "accepted, measured"] = 100 * own["accepted"].sum() / max(own["drafted"].sum(), 1)
        table.loc[chosen, "tokens per round, measured"] = own["tokens"].sum() / max(own["deep"].sum(), 1)
    table["accepted"] *= 100
    names = {
        "accepted": "accepted (%)",
        "accepted, measured": "accepted, measured (%)",
        "per_round": "tokens per round",
    }
    return table.rename(columns=names | {"draft": "longest draft"})


# ---- words


def costs_in_words(found: Race) -> str:
    """What a step costs here, in milliseconds and in blocks."""
    costs = found.costs
    block = costs.block.of(1)
    wide = found.sizes[-1]
    more = f", and for {wide} tokens at once {costs.block.of(wide) / block:.1f} times as much" if wide > 1 else ""
    return (
        f"On this machine a block of {found.study.model.name} takes {1000 * block:.2f} ms for one token{more}. In "
        f"blocks, a last read of the head costs {costs.head_in_blocks:.1f}, a question to the gate "
        f"{costs.ask.of(1) / block:.1f}, the keys and values of a skipped block {costs.key / block:.1f}, a call of the "
        f"network {costs.call / block:.1f}, and all else in a step {costs.step / block:.1f}."
    )


def race_in_words(found: Race) -> str:
    """Which ways are surely faster than plain decoding, by batch size, and which of them lose nothing."""
    said = []
    for size in found.sizes:
        named = {}
        for way in found.ways[1:]:
            gain = attempt(lambda: faster(found, way.name, size))
            if gain.known and gain.low > 1:
                named[way.name] = gain
        told_of = ", ".join(f"{name} ({told(gain, ' times', 2)})" for name, gain in named.items())
        several = f"in batches of {size}" if size > 1 else "one prompt at a time"
        said.append(f"Surely faster than plain decoding, {several}: {told_of or 'none'}.")
    return " ".join(said)


def good_in_words(found: Race) -> str:
    """The fastest way that keeps enough, one prompt at a time."""
    table = race_table(found)
    table = table[(table["batch"] == 1) & table["way"].isin([way.name for way in found.ways])]
    plain, name = table[table["way"] == PLAIN].iloc[0], score_name(found)
    keeps = table["tokens that are plain's (%)"] >= QUALITY
    if name in table and plain[name] > 0:
        keeps &= 100 * table[name] / plain[name] >= QUALITY
    top = table[keeps].sort_values("tokens per second").iloc[-1]
    if top["way"] == PLAIN:
        return f"Of the ways that keep {QUALITY:.0f}% of plain decoding's tokens and score, none is faster than plain."
    ratio = top["tokens per second"] / plain["tokens per second"]
    return (
        f"Of the ways that keep {QUALITY:.0f}% of plain decoding's tokens and score, the fastest is {top['way']}, "
        f"{ratio:.2f} times plain decoding's tokens per second."
    )


def melting_in_words(melting: pd.DataFrame) -> str:
    """Where the possible speed-up goes, from stage to stage; of a frame of `speed.stages`."""
    best, gate, asking, moving = melting["speed_up"][:4]
    ends = melting[4:].groupby("stage", sort=False)["speed_up"].agg(["min", "max"])
    spans = "; ".join(f"{stage} {row['min']:.2f} to {row['max']:.2f}" for stage, row in ends.iterrows())
    return (
        f"By the forecast, the best layer would make decoding {best:.2f} times as fast as plain if blocks and "
        f"the last head were all that is paid. With the gate's own layers that is {gate:.2f}, with its questions "
        f"{asking:.2f}, with calls and Python {moving:.2f}. Then, by what is done about keys and values: {spans}."
    )


def error_in_words(table: pd.DataFrame) -> str:
    """How far the forecast was off; of a frame of `race_table`."""
    known = table[table["way"] != PLAIN].dropna(subset=["forecast"])
    measured = [one.estimate for one in known["times as fast"]]
    errors = [abs(f / m - 1) for f, m in zip(known["forecast"], measured) if m == m]
    if not errors:
        return ""
    return (
        f"The forecast was off by {100 * sum(errors) / len(errors):.0f}% on average and by {100 * max(errors):.0f}% at "
        f"most, over {len(errors)} ways and batch sizes."
    )


def keep(results: Results, found: Race, table: pd.DataFrame, melting: pd.DataFrame) -> None:
    """Put the outcomes into a notebook's results, and what the prose says of them."""
    for row in table.to_dict("records"):
        where = f"{row['way']}, batch {row['batch']}"
        for column, value in row.items():
            if value.known if isinstance(value, Interval) else isinstance(value, float) and value == value:
                results.keep(f"{column}, {where}", value)
    results.say("gate_name", label(found.rule.gate.name))
    results.tell("costs_words", costs_in_words(found))
    results.tell("race_words", race_in_words(found))
    results.tell("good_words", good_in_words(found))
    results.tell("melting_words", melting_in_words(melting))
    results.tell("error_words", error_in_words(table))
