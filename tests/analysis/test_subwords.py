"""What words say about exit layers: every analysis against plain loops."""

from itertools import product

import numpy as np
import pytest
from words_made import make_trace

from eestudy.old.analysis import subwords as exits
from eestudy.old.analysis.words import ROLES, words_of


@pytest.fixture(scope="module")
def random_case():
    rng = np.random.default_rng(1)
    pieces = [" the", " un", "do", "ing", ",", " 12", " x.", " cat", " co", "-", "op"]
    outputs = [list(rng.choice(pieces, size=rng.integers(5, 25))) for _ in range(30)]
    trace = make_trace(*outputs, groups=[i // 2 for i in range(30)])
    frame = words_of(trace)
    layers = rng.integers(1, 13, len(frame)) + 2 * (frame["role"] == "prefix").to_numpy()
    return frame, layers


@pytest.fixture(scope="module")
def few_groups(random_case):
    """The tokens of ten sequences in five groups, with layers among which there are no ties."""
    frame = random_case[0][random_case[0]["sequence"] < 10]
    return frame, np.random.default_rng(5).normal(6, 2, len(frame))


def signed_ranks_p(differences):
    """Two-sided p of the signed ranks, over every way to choose the signs."""
    ranks = [sum(abs(other) <= abs(value) for other in differences) for value in differences]

    def distance(positive):
        return abs(sum(rank for rank, above in zip(ranks, positive) if above) - sum(ranks) / 2)

    found = distance([value > 0 for value in differences])
    ways = list(product([False, True], repeat=len(ranks)))
    return sum(distance(way) >= found for way in ways) / len(ways)


def words_by_loop(frame, layers):
    """{(sequence, word): (group, layers of the pieces)} of the words of several pieces, none of them mixed."""
    found, wanted = {}, {}
    for row, layer in zip(frame.to_dict("records"), layers):
        if row["role"] in ("prefix", "suffix"):
            place = row["sequence"], row["word"]
            found.setdefault(place, (row["group"], []))[1].append(layer)
            wanted[place] = row["pieces"]
    return {place: word for place, word in found.items() if len(word[1]) == wanted[place]}


def test_share_readings(random_case):
    frame, layers = random_case
    later = {place for place, (_, (prefix, *rest)) in words_by_loop(frame, layers).items() if prefix > np.mean(rest)}
    tokens = ends = in_several = suffixes = of_later = words = cut = 0
    for row in frame.to_dict("records"):
        tokens += not row["is_eos"]
        ends += row["is_eos"]
        in_several += row["role"] in ("prefix", "suffix")
        suffixes += row["role"] == "suffix"
        of_later += row["role"] == "prefix" and (row["sequence"], row["word"]) in later
        words += row["role"] in ("prefix", "single")
        cut += row["role"] == "prefix"
    assert 0 < of_later < cut and ends
    shares = exits.share_readings(frame, layers)
    assert [share.estimate for share in shares.values()] == pytest.approx(
        [in_several / tokens, in_several / (tokens + ends), suffixes / tokens, of_later / tokens, cut / words]
    )
    assert all(share.low < share.estimate < share.high and share.sequences == 15 for share in shares.values())
    assert [*exits.share_readings(words_of(make_trace([])), [1])] == ["the same, end tokens among all tokens"]


def test_prefix_suffix_difference(random_case):
    frame, layers = random_case
    differences = [prefix - np.mean(rest) for _, (prefix, *rest) in words_by_loop(frame, layers).values()]
    later, earlier = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    result = exits.prefix_suffix_difference(frame, layers)
    assert result.words == len(differences) > 20 and later + earlier < result.words
    assert result.difference.estimate == pytest.approx(np.mean(differences))
    assert result.later.estimate == pytest.approx(later / result.words)
    assert result.earlier.estimate == pytest.approx(earlier / result.words)
    assert result.effect.estimate == pytest.approx((later - earlier) / result.words)
    assert result.effect.low < result.effect.estimate < result.effect.high and result.effect.sequences == 15
    assert result.difference.low > 0 and result.groups_p < 0.05


def test_prefix_suffix_p_has_one_value_per_group(few_groups):
    frame, layers = few_groups
    by_group = {}
    for group, (prefix, *rest) in words_by_loop(frame, layers).values():
        by_group.setdefault(group, []).append(prefix - np.mean(rest))
    assert len(by_group) == 5 and max(map(len, by_group.values())) > 1
    expected = signed_ranks_p([np.mean(differences) for differences in by_group.values()])
    assert exits.prefix_suffix_difference(frame, layers).groups_p == pytest.approx(expected)


def test_words_with_a_mixed_piece_are_not_compared():
    frame = words_of(make_trace([' "un', "seen", " un", "do"]))
    table = exits.whole_words(frame, [1, 2, 9, 4, 0])
    assert table[["word", "prefix", "suffixes"]].values.tolist() == [[1, 9, 4]]
    with pytest.raises(ValueError, match="no word of several pieces"):
        exits.prefix_suffix_difference(words_of(make_trace(["a", " b"])), [1, 2, 3])
    assert exits.prefix_suffix_difference(words_of(make_trace([" un", "do"])), [3, 3, 3]).groups_p == 1


def test_prefix_vs_single(random_case):
    frame, layers = random_case
    by_bin = {}
    for role, position, layer in zip(frame["role"], frame["position"], layers):
        if role in ("prefix", "single"):
            by_bin.setdefault(position // 4, {"prefix": [], "single": []})[role].append(layer)
    total = count = singles = lost = 0
    for sides in by_bin.values():
        if sides["prefix"] and sides["single"]:
            total += len(sides["prefix"]) * (np.mean(sides["prefix"]) - np.mean(sides["single"]))
            count += len(sides["prefix"])
            singles += len(sides["single"])
        else:
            lost += len(sides["prefix"])
    shared = [(prefix, sides["single"]) for sides in by_bin.values() for prefix in sides["prefix"] if sides["single"]]
    ahead = [np.mean([float(a > b) - float(a < b) for b in others]) for a, others in shared]
    result = exits.prefix_vs_single(frame, layers)
    assert result.effect == pytest.approx(np.mean(ahead)) and 0 < result.effect < 1 and result.groups_p < 0.05
    assert result.difference.estimate == pytest.approx(total / count)
    assert (result.prefixes, result.singles, result.unmatched) == (count, singles, lost)


def test_prefix_vs_single_p_has_one_value_per_group(few_groups):
    frame, layers = few_groups
    rows = [row | {"layer": layer, "bin": row["position"] // 4} for row, layer in zip(frame.to_dict("records"), layers)]
    by_group = {}
    for row in rows:
        singles = [other["layer"] for other in rows if other["role"] == "single" and other["bin"] == row["bin"]]
        if row["role"] == "prefix" and singles:
            by_group.setdefault(row["group"], []).append(row["layer"] - np.mean(singles))
    expected = signed_ranks_p([np.mean(differences) for differences in by_group.values()])
    assert len(by_group) == 5 and exits.prefix_vs_single(frame, layers).groups_p == pytest.approx(expected)


def test_neighbouring_singles(random_case):
    frame, layers = random_case
    rows, steps = frame.to_dict("records"), []
    for i in range(len(rows) - 1):
        if rows[i]["role"] == rows[i + 1]["role"] == "single" and rows[i]["sequence"] == rows[i + 1]["sequence"]:
            steps.append(layers[i] - layers[i + 1])
    step = exits.neighbouring_singles(frame, layers)
    assert step.estimate == pytest.approx(np.mean(steps)) and step.low < step.estimate < step.high
    across = words_of(make_trace([" a"], [" b"], [" c", ".", " d"], eos=False))
    with pytest.raises(ValueError):  # no two in a row: a new sequence, and a full stop, come in between
        exits.neighbouring_singles(across, [1, 2, 3, 4, 5])


def test_matching_takes_a_pure_position_effect_out():
    outputs = [[" a"] * 6 + [" un", "do"] * 6] * 8 + [[" un", "do"] * 3 + [" a"] * 9] * 8
    frame = words_of(make_trace(*outputs))
    position_only = frame["position"].to_numpy() // 4
    prefix, single = (position_only[frame["role"] == role].mean() for role in ("prefix", "single"))
    assert prefix != single
    assert exits.prefix_vs_single(frame, position_only).difference[:3] == pytest.approx((0, 0, 0))
    with pytest.raises(ValueError, match="never stand at the same"):
        exits.prefix_vs_single(words_of(make_trace([" un", "do", ".", ".", " a"])), [1] * 6)
    with pytest.raises(ValueError, match="some of both"):
        exits.prefix_vs_single(words_of(make_trace([" a"])), [1, 1])


def test_roles_and_tags(random_case):
    frame, layers = random_case
    table = exits.exit_by_role(frame, layers).set_index("role")
    assert list(table.index) == [role for role in ROLES if role in set(frame["role"][~frame["is_eos"]])]
    assert table["share"].sum() == pytest.approx(1)
    mask = (frame["role"] == "digits").to_numpy()
    assert table.loc["digits", "mean"].estimate == pytest.approx(layers[mask].mean())
    upos = frame["role"].map({"prefix": "NOUN", "suffix": "NOUN", "single": "DET", "digits": "NUM"}).fillna("")
    tagged = frame.assign(upos=upos)
    by_tag = exits.exit_by_upos(tagged, layers).set_index("upos")
    assert set(by_tag.index) == {"NOUN", "DET", "NUM"} and by_tag["n"].sum() == (upos != "").sum()
    assert by_tag.loc["DET", "mean"].estimate == pytest.approx(layers[(upos == "DET").to_numpy()].mean())


def test_upos_tests(random_case):
    frame, _ = random_case
    upos = frame["role"].map({"prefix": "NOUN", "suffix": "VERB", "single": "DET", "digits": "NUM"}).fillna("")
    layers = np.random.default_rng(2).integers(1, 7, len(frame)) + 5 * (upos == "NOUN").to_numpy()
    tests = exits.upos_tests(frame.assign(upos=upos), layers, minimum=5)
    noun, rest = layers[(upos == "NOUN").to_numpy()], layers[(~upos.isin(["NOUN", ""])).to_numpy()]
    row = tests.table.set_index("upos").loc["NOUN"]
    assert row["cliffs_delta"] == pytest.approx(np.mean([(a > b) - float(a < b) for a in noun for b in rest]))
    assert row["difference"] == pytest.approx(noun.mean() - rest.mean()) and row["n"] == len(noun)
    assert (tests.table["p_holm"] >= tests.table["p"]).all() and row["p_holm"] < 0.001
    assert tests.kruskal_p < 0.001 and tests.epsilon_squared.low > 0.1
    assert tests.epsilon_squared.estimate == pytest.approx(tests.kruskal_h / ((upos != "").sum() - 1))
    assert tests.left_out == {}
    few = exits.upos_tests(frame.assign(upos=upos.where(frame.index != 0, "X")), layers, minimum=5)
    assert few.left_out == {"X": 1}
    with pytest.raises(ValueError, match="fewer than two"):
        exits.upos_tests(frame.assign(upos=upos), layers, minimum=10**6)
    with pytest.raises(ValueError, match="same layer"):
        exits.upos_tests(frame.assign(upos=upos), np.ones(len(frame)))


def test_epsilon_squared_above_chance(random_case):
    frame, layers = random_case
    upos = frame["role"].map({"prefix": "NOUN", "suffix": "VERB", "single": "DET", "digits": "NUM"}).fillna("")
    tagged = frame.assign(upos=upos, group=frame["group"] + 10)  # two digits: numbers and texts sort alike
    few = frame["sequence"].to_numpy() < 12
    tasks = {"all": (tagged, layers), "few": (tagged[few], layers[few]), "one tag": (tagged.assign(upos="X"), layers)}
    minimum = sorted(upos[few & (upos != "")].value_counts())[1]  # leaves out one tag of the smaller task
    found = []
    for frame, layers in [tasks["all"], tasks["few"]]:
        names = [name for name in set(frame["upos"]) - {""} if sum(frame["upos"] == name) >= minimum]
        pairs = [(layer, name) for layer, name in zip(layers, frame["upos"]) if name in names]
        ranks = [
            sum(other < layer for other, _ in pairs) + (1 + sum(other == layer for other, _ in pairs)) / 2
            for layer, _ in pairs
        ]
        middle, between = np.mean(ranks), 0
        for name in names:
            mine = [rank for rank, (_, its) in zip(ranks, pairs) if its == name]
            between += len(mine) * (np.mean(mine) - middle) ** 2
        found.append(between / sum((rank - middle) ** 2 for rank in ranks))
    excess, (chance, spread) = exits.excess_epsilon_squared(tasks, minimum), exits.by_chance(tasks, minimum)
    assert excess.estimate == pytest.approx(np.mean(found) - chance) and found[0] != pytest.approx(found[1])
    assert 0 < chance < 0.1 and 0 < spread < 0.1 and excess.low < excess.high and excess.sequences == 6
    with pytest.raises(ValueError, match="fewer than two"):
        exits.excess_epsilon_squared({"one tag": tasks["one tag"]})
