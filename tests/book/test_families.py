"""The part on architectures: counted by kind, judged on those asked for, each of the others with its reason."""

from eestudy.book.families import families, family_goal


def family(name: str, **values) -> dict:
    """One family's row; passes everything unless told otherwise."""
    return {
        "architecture": name,
        "model_type": name.lower(),
        "kind": "causal",
        "built": True,
        "attention_based": True,
        "readout": "pass",
        "sublayers": "pass",
        "padding": "batched",
        "decoding": "pass",
        "reason": "",
    } | values


def test_families_are_counted_by_kind_and_the_goal_leaves_out_what_is_not_asked():
    refused = [
        family("Refused", sublayers="refused", reason="module x"),
        family("State", attention_based=False, readout="fail"),
        family("Unbuilt", built=False, readout="", sublayers="", padding="", decoding=""),
    ]
    tried = [family(f"Good{i}") for i in range(9)] + refused
    goal = family_goal(tried)
    assert goal["met"] and goal["measured"] == "9 of 10 (90%)"
    assert not family_goal([*tried, family("Worse", padding="fail")])["met"]
    masked = family("BertForMaskedLM", kind="masked", padding="equal lengths", decoding="none")
    page = "\n".join(families({"rows": [*tried, masked]}))
    assert "| Causal | 11 of 12 | 10 | 10 | 11 | 11 | 9 |" in page
    assert "| Masked | 1 of 1 | 1 | 1 | 1 | – | 1 |" in page
    assert page.count("{dropdown}") == 2
    assert "| refused | sub-layers: refused | module x |" in page
    assert "(9):** good0, good1" in page and "only rows of equal length share a batch (1):** bertformaskedlm" in page
