"""Exit layers by class of token and by part of speech: by task, in tables, and in the prose of the sub-words page.

`pieces` is {task: `words.read_words`} throughout.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from eelib.common.errors import NotEstimable
from eelib.tracing.trace import DEFINITIONS
from eestudy.claims import claim
from eestudy.old.analysis.subwords import (
    Tagged,
    TagTests,
    by_chance,
    excess_epsilon_squared,
    exit_by_role,
    exit_by_upos,
    upos_tests,
)
from eestudy.old.analysis.words import ROLES, english_tasks, judged_tasks
from eestudy.old.statistics.interval import Interval, short_p
from eestudy.old.statistics.stats import attempt
from eestudy.old.study.results import Results
from eestudy.old.study.study import Study

LEVEL = 0.05  # a tag differs from the rest where its p-value, after Holm, is below
Pieces = Mapping[str, pd.DataFrame]
Means = Mapping[str, Mapping[str, pd.DataFrame]]  # definition -> task -> mean exit layers


# ---- means


def by_role(study: Study, pieces: Pieces) -> dict[str, dict[str, pd.DataFrame]]:
    """{definition: {task: `exit_by_role`}}."""
    seed = study.parameters.seed
    return {d: {n: exit_by_role(words, words[d], seed) for n, words in pieces.items()} for d in DEFINITIONS}


def roles_in(found: Means) -> list[str]:
    """The classes that any task has, in ROLES' order."""
    present = {role for table in found["first"].values() for role in table["role"]}
    return [role for role in ROLES if role in present]


def role_table(study: Study, found: Means) -> pd.DataFrame:
    """A row per task and class of token."""
    rows = []
    for task, first in found["first"].items():
        stable = found["stable"][task].set_index("role")["mean"]
        for row in first.to_dict("records"):
            shown = {
                "task": study.labels[task],
                "class": row["role"],
                "tokens": row["n"],
                "share (%)": 100 * row["share"],
            }
            rows.append(shown | {'mean, "first"': row["mean"], 'mean, "stable"': stable[row["role"]]})
    return pd.DataFrame(rows)


def by_tag(study: Study, pieces: Pieces, minimum: int) -> dict[str, dict[str, pd.DataFrame]]:
    """{definition: {English task: `exit_by_upos` of the tags with `minimum` tokens or more}}."""
    seed, english = study.parameters.seed, english_tasks(study)
    found = {d: {n: exit_by_upos(pieces[n], pieces[n][d], seed) for n in english} for d in DEFINITIONS}
    return {d: {n: table[table["n"] >= minimum] for n, table in by_task.items()} for d, by_task in found.items()}


def tags_in(found: Means, definition: str = "first") -> list[str]:
    """The tags that any task has, the latest by `definition`, averaged over tasks, on top."""
    rows = [
        (tag, mean.estimate) for table in found[definition].values() for tag, mean in zip(table["upos"], table["mean"])
    ]
    means = pd.DataFrame(rows, columns=["upos", "mean"]).groupby("upos")["mean"].mean()
    return means.sort_values(ascending=False).index.tolist()


def keep_means(results: Results, found: Means, column: str) -> None:
    """Keep the mean exit layer of every class or tag, as `column` names them, of every task."""
    for definition, by_task in found.items():
        for task, table in by_task.items():
            results.put_all(task, {f"{n}, {definition}": mean for n, mean in zip(table[column], table["mean"])})


# ---- tests


def tag_tests(study: Study, pieces: Pieces, minimum: int) -> dict[tuple[str, str], TagTests]:
    """{(English task, definition): `upos_tests`}, where there is something to test."""
    seed, found = study.parameters.seed, {}
    for name in english_tasks(study):
        for definition in DEFINITIONS:
            words = pieces[name]
            found[name, definition] = attempt(lambda: upos_tests(words, words[definition], minimum, seed), None)
    return {key: test for key, test in found.items() if test}


def keep_tests(results: Results, tests: Mapping[tuple[str, str], TagTests]) -> None:
    """Keep how much of the rank variance lies between tags, of every test."""
    for (task, definition), test in tests.items():
        results.put(task, f"epsilon-squared, {definition}", test.epsilon_squared)


def kruskal_table(
    study: Study, pieces: Pieces, tests: Mapping[tuple[str, str], TagTests], minimum: int
) -> pd.DataFrame:
    """A row per test of `tag_tests`; what chance gives is taken off in the last two Intervals, the second of which is
    over first pieces and whole words alone.
    """
    rows = []
    for (name, definition), test in tests.items():
        tokens, starts = int(test.table["n"].sum()), pieces[name][pieces[name]["role"] != "suffix"]
        whole, alone = (
            attempt(lambda: excess_epsilon_squared({name: (words, words[definition])}, minimum, study.parameters.seed))
            for words in (pieces[name], starts)
        )
        rows.append(
            {
                "task": study.labels[name],
                "exit layer": definition,
                "tokens": tokens,
                "tags": len(test.table),
                "H": test.kruskal_h,
                "p": test.kruskal_p,
                "epsilon-squared": test.epsilon_squared,
                "above chance": whole,
                "above chance, first pieces": alone,
                "tags left out": ", ".join(f"{tag} ({count})" for tag, count in test.left_out.items()) or "none",
            }
        )
    return pd.DataFrame(rows)


def tested_together(study: Study) -> list[str]:
    """The tasks whose tokens are tested together: those judged, other learnt English ones where there is none."""
    return judged_tasks(study) or [name for name in english_tasks(study) if study.learnt[name]]


def tests_together(study: Study, pieces: Pieces, minimum: int) -> dict[str, TagTests]:
    """{definition: `upos_tests` over the tokens of `tested_together`}; {} where there is nothing to test."""
    parts = [
        pieces[name].assign(group=name + " " + pieces[name]["group"].astype(str)) for name in tested_together(study)
    ]
    if not parts:
        return {}
    every, seed = pd.concat(parts), study.parameters.seed
    found = {d: attempt(lambda: upos_tests(every, every[d], minimum, seed), None) for d in DEFINITIONS}
    return found if all(found.values()) else {}


def tag_table(tests: Mapping[str, TagTests]) -> pd.DataFrame:
    """Each tag against all others, by both definitions."""
    table = tests["first"].table.set_index("upos")[["n"]].rename(columns={"n": "tokens"})
    for d, test in tests.items():
        rows = test.table.set_index("upos")
        gaps = [Interval(row.difference, row.low, row.high, int(row.n)) for row in rows.itertuples()]
        table[f'difference, "{d}"'] = pd.Series(gaps, index=rows.index)
        table[f'Cliff\'s delta, "{d}"'] = rows["cliffs_delta"].map("{:.2f}".format)
        table[f'p (Holm), "{d}"'] = rows["p_holm"].map(short_p)
    return table.rename_axis("tag").reset_index()


def rank_variance(study: Study, pieces: Pieces, definition: str, minimum: int) -> Interval:
    """Epsilon-squared of exit layer by tag above chance, over the judged tasks (claim P-W3)."""
    return excess_epsilon_squared(judged_words(study, pieces, definition), minimum, study.parameters.seed)


def judged_words(study: Study, pieces: Pieces, definition: str) -> Tagged:
    """{judged task: (words, exit layers)}. NotEstimable where there is none."""
    judged = judged_tasks(study)
    if not judged:
        raise NotEstimable("no learnt translation task into English in this run")
    return {name: (pieces[name], pieces[name][definition]) for name in judged}


def tellable_rank_variance(study: Study, pieces: Pieces, minimum: int) -> Interval:
    """`rank_variance`, "first"; NotEstimable where so few tokens exceed the claim's threshold by chance alone."""
    asked = claim("P-W3").threshold
    _, deviation = by_chance(judged_words(study, pieces, "first"), minimum, study.parameters.seed)
    if 2 * deviation > asked:
        raise NotEstimable(
            f"too few tagged tokens: with tags permuted, epsilon-squared strays by {2 * deviation:.3f} from its mean "
            f"(two standard deviations), more than the {asked:g} asked"
        )
    return rank_variance(study, pieces, "first", minimum)


def tag_figures(study: Study, pieces: Pieces, means: Means, tests: Mapping[str, TagTests], minimum: int) -> dict:
    """What the prose says of tags, by both definitions; the latest and the earliest as `tags_in` has them."""
    figures: dict[str, Interval | float | str] = {}
    for d in DEFINITIONS:
        table = tests[d].table if tests else pd.DataFrame({"p_holm": [np.nan]})
        tags = tags_in(means, d) or ["none"]
        figures |= {
            f"epsilon_{d}": attempt(lambda: rank_variance(study, pieces, d, minimum)),
            f"tags_{d}": len(table) if tests else 0,
            f"tags_apart_{d}": (table["p_holm"] < LEVEL).sum(),
            f"latest_{d}": tags[0],
            f"earliest_{d}": tags[-1],
        }
    return figures
