"""Pieces of words, by task, in tables and in the prose of the sub-words page, and the page's verdicts.

`pieces` is {task: `words.read_words`} throughout.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pandas as pd
from transformers import PreTrainedTokenizerBase

from eelib.common.errors import NotEstimable
from eelib.tracing.trace import DEFINITIONS, Trace
from eestudy.claims import Verdict, published
from eestudy.old.analysis.earliness import Values
from eestudy.old.analysis.subwords import (
    BIN_WIDTH,
    Matched,
    WithinWord,
    neighbouring_singles,
    prefix_suffix_difference,
    prefix_vs_single,
    share_readings,
    whole_words,
)
from eestudy.old.analysis.subwords_classes import LEVEL, tellable_rank_variance
from eestudy.old.analysis.words import judged_tasks, outside_joined_words
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import attempt, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

Pieces = Mapping[str, pd.DataFrame]


class Compared(NamedTuple):
    """What the pieces of one task's words say, by one definition; None or NOTHING where there is too little."""

    within: WithinWord | None
    unjoined: Interval  # the same difference as `within`, words with an apostrophe or a hyphen left out
    matched: Matched | None
    step: Interval  # a single-piece word minus the next one


Comparisons = Mapping[str, Mapping[str, Compared]]  # definition -> task -> what was found


def about_the_run(study: Study) -> dict[str, float | str]:
    """What the prose says of the run itself."""
    return {
        "name": study.model.name,
        "depth": study.model.layers,
        "judged_tasks": len(judged_tasks(study)),
        "all_tasks": len(study.traces),
        "tag_level": LEVEL,
        "bin_width": BIN_WIDTH,
    }


def over_judged(
    study: Study, pieces: Pieces, values: Callable[[pd.DataFrame], Values], missing: str, share: bool = True
) -> Interval:
    """Unweighted mean over the judged tasks of `values(words)`, a pair (values, groups).

    NotEstimable where no task is judged, or where none has a value: what is `missing`.
    """
    judged = judged_tasks(study)
    if not judged:
        raise NotEstimable("no learnt translation task into English in this run")
    found = {name: values(pieces[name]) for name in judged}
    found = {name: pair for name, pair in found.items() if len(pair[0])}
    if not found:
        raise NotEstimable(missing)
    return bootstrap_unweighted_mean_over_tasks(found, seed=study.parameters.seed, share=share)


# ---- how many tokens are pieces


def readings(study: Study, pieces: Pieces) -> dict[str, dict[str, Interval]]:
    """{task: `share_readings`, in percent}."""
    seed = study.parameters.seed
    return {
        name: {reading: share.percent for reading, share in share_readings(words, words["first"], seed).items()}
        for name, words in pieces.items()
    }


def keep_readings(results: Results, found: Mapping[str, Mapping[str, Interval]]) -> None:
    """Keep every reading of every task."""
    for task, shares in found.items():
        results.put_all(task, {f"share: {reading}": share for reading, share in shares.items()})


def reading_table(study: Study, found: Mapping[str, Mapping[str, Interval]]) -> pd.DataFrame:
    """A row per reading, a column per task."""
    names = dict.fromkeys(reading for shares in found.values() for reading in shares)
    rows = [
        {"reading": name} | {study.labels[task]: shares.get(name, NOTHING) for task, shares in found.items()}
        for name in names
    ]
    return pd.DataFrame(rows, columns=["reading", *study.labels.values()])


def share(study: Study, pieces: Pieces) -> Interval:
    """Share of tokens that share their word with another, over the judged tasks (claim P-W2)."""

    def in_several(words: pd.DataFrame) -> Values:
        counted = words[~words["is_eos"]]
        return counted["role"].isin(["prefix", "suffix"]).to_numpy(float), counted["group"].to_numpy()

    return over_judged(study, pieces, in_several, "no output has a token")


def printed_share() -> float:
    """P's own share, in percent."""
    row = "tokens that are part of a word of several pieces, into English"
    return published("P-text").set_index("key").loc[row, "value"]


# ---- prefixes, suffixes, single-piece words


def compared(words: pd.DataFrame, trace: Trace, definition: str, seed: int = 0) -> Compared:
    """Prefixes against suffixes and against whole words, in one task."""
    layers, unjoined = words[definition], outside_joined_words(words, trace)
    other = attempt(lambda: prefix_suffix_difference(words[unjoined], layers[unjoined], seed), None)
    return Compared(
        attempt(lambda: prefix_suffix_difference(words, layers, seed), None),
        other.difference if other else NOTHING,
        attempt(lambda: prefix_vs_single(words, layers, seed=seed), None),
        attempt(lambda: neighbouring_singles(words, layers, seed)),
    )


def comparisons(study: Study, pieces: Pieces) -> Comparisons:
    """`compared` of every task, by both definitions."""
    seed = study.parameters.seed
    return {d: {n: compared(words, study.traces[n], d, seed) for n, words in pieces.items()} for d in DEFINITIONS}


def differences(study: Study, found: Comparisons) -> dict[str, dict[str, dict[str, Interval]]]:
    """{title: {definition: {task's label: difference}}} for the figure; {} where there is nothing to compare."""
    panels = {}
    for title, name in (("prefix − suffixes, same word", "within"), ("prefix − single, same position", "matched")):
        panels[title] = {
            d: {study.labels[n]: getattr(x, name).difference for n, x in by_task.items() if getattr(x, name)}
            for d, by_task in found.items()
        }
    return panels if any(by_task for panel in panels.values() for by_task in panel.values()) else {}


def within_table(study: Study, found: Comparisons) -> pd.DataFrame:
    """Prefix minus the mean of its suffixes: a row per task and definition that has words of several pieces."""
    rows = [
        {
            "task": study.labels[name],
            "exit layer": definition,
            "words": within.words,
            "difference, layers": within.difference,
            "without apostrophes and hyphens": found[definition][name].unjoined,
            "prefix later (%)": 100 * within.later.estimate,
            "prefix earlier (%)": 100 * within.earlier.estimate,
            "effect size": within.effect,
            "p": within.groups_p,
            "single − next single, layers": found[definition][name].step,
        }
        for name in study.traces
        for definition in DEFINITIONS
        if (within := found[definition][name].within)
    ]
    return pd.DataFrame(rows)


def matched_table(study: Study, found: Comparisons) -> pd.DataFrame:
    """Prefixes minus single-piece words at the same positions: a row per task and definition that has both."""
    rows = [
        {
            "task": study.labels[name],
            "exit layer": definition,
            "prefixes": matched.prefixes,
            "singles": matched.singles,
            "no match": matched.unmatched,
            "difference, layers": matched.difference,
            "effect size": matched.effect,
            "p": matched.groups_p,
        }
        for name in study.traces
        for definition in DEFINITIONS
        if (matched := found[definition][name].matched)
    ]
    return pd.DataFrame(rows)


def keep_comparisons(results: Results, found: Comparisons) -> None:
    """Keep the differences of every task."""
    for definition, by_task in found.items():
        for task, (within, _, matched, step) in by_task.items():
            if within:
                results.put(task, f"prefix minus suffixes, {definition}", within.difference)
                results.put(task, f"prefix later minus earlier, {definition}", within.effect)
            if matched:
                results.put(task, f"prefix minus single, {definition}", matched.difference)
            if step.known:
                results.put(task, f"single minus next single, {definition}", step)


def inside_words(study: Study, pieces: Pieces, definition: str) -> Interval:
    """Prefix minus the mean of its suffixes inside words, over the judged tasks (claim P-W1)."""

    def difference(words: pd.DataFrame) -> Values:
        table = whole_words(words, words[definition])
        return (table["prefix"] - table["suffixes"]).to_numpy(), table["group"].to_numpy()

    return over_judged(study, pieces, difference, "no word of several pieces in the outputs", share=False)


def comparison_figures(study: Study, pieces: Pieces, found: Comparisons) -> dict[str, Interval | float]:
    """What the prose says of prefixes, over the judged tasks; distance: of a suffix behind its prefix, in positions."""
    judged = judged_tasks(study)
    figures: dict[str, Interval | float] = {}
    for definition, by_task in found.items():
        matched = [every.difference for name in judged if (every := by_task[name].matched)]
        sides = [difference.side("later", "earlier", "neither") for difference in matched]
        steps = [by_task[name].step.estimate for name in judged if by_task[name].step.known]
        figures |= {
            f"inside_{definition}": attempt(lambda: inside_words(study, pieces, definition)),
            f"matched_tasks_{definition}": len(matched),
            f"matched_later_{definition}": sides.count("later"),
            f"matched_earlier_{definition}": sides.count("earlier"),
            f"step_{definition}": sum(steps) / len(steps) if steps else float("nan"),
        }
    sizes = [pieces[name].loc[pieces[name]["role"] == "prefix", "pieces"] for name in judged]
    return figures | {"distance": pd.concat(sizes).mean() / 2 if sizes else float("nan")}


# ---- verdicts


def is_llama_2(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is P's tokenizer: SentencePiece with 32,000 pieces, single bytes from the fourth on."""
    llama = type(tokenizer).__name__.startswith("Llama") and tokenizer.vocab_size == 32_000
    return llama and tokenizer.convert_ids_to_tokens(3) == "<0x00>"


def verdicts(study: Study, pieces: Pieces, minimum: int) -> list[Verdict]:
    """Verdicts on P-W1 to P-W3."""
    tasks, llama = len(judged_tasks(study)), is_llama_2(study.model.tokenizer)
    return [
        study.judge("P-W1", lambda: inside_words(study, pieces, "first"), tasks=tasks),
        study.judge("P-W2", lambda: share(study, pieces), requirement_met=llama, tasks=tasks),
        study.judge("P-W3", lambda: tellable_rank_variance(study, pieces, minimum), tasks=tasks),
    ]
