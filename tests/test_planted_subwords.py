"""Sub-words: exit layers by a token's place in a word and a sentence, read with a tokenizer of P's class and size.

P-W2 is judged for the paper's tokenizer alone, so the planted one has its class, its size and its single bytes. It cuts
exactly the words in CUT, each in two.
"""

import json

import families
import numpy as np
import pytest
import transformers as hf
from planted import STEPS, exits, plant, verdicts

import eelib

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CLAIMS = ("P-W1", "P-W2", "P-W3")
CUT = [("tea", "pot"), ("foot", "path"), ("book", "shop"), ("cat", "walk")]
STARTS, ENDS = zip(*CUT)
WHOLE = ["dog", "house", "hill", "garden", "river", "city"]
FRAME = "The {} saw a {} near the {} and took a {} to the {}."
OTHERS = ["The", "saw", "a", "near", "the", "and", "took", "to"]
ENTRIES = 32_000


def chains(words: list[str]) -> list[tuple[str, str]]:
    """Merges that put each of these words together letter by letter."""
    return list(dict.fromkeys((word[:n], word[n]) for word in words for n in range(1, len(word))))


def tokenizer() -> hf.LlamaTokenizer:
    """One that reads every planted word whole, but for those in CUT; most of its entries are never used."""
    merges = chains([f"▁{word}" for word in [*OTHERS, *WHOLE, *STARTS]]) + chains(list(ENDS))
    longer = ["".join(merge) for merge in merges]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    entries = [*special, *sorted(set("".join(longer) + ".")), *longer]
    entries += [f"<unused {n}>" for n in range(ENTRIES - len(entries))]
    return hf.LlamaTokenizer(vocab={entry: n for n, entry in enumerate(entries)}, merges=merges, pad_token="<unk>")


@pytest.fixture
def llama(tmp_path):
    """A tiny model of three layers with that tokenizer."""
    config = families.FAMILIES["llama"].config(vocab_size=ENTRIES, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    return eelib.load_model(str(tmp_path / "llama"), device="cpu")


def outputs(cut: int) -> list[str]:
    """32 outputs, each a sentence and its repetition; of its five nouns, the last `cut` are in CUT."""
    nouns = [["".join(CUT[(i + n) % 4]) if n >= 5 - cut else WHOLE[(i + n) % 6] for n in range(5)] for i in range(32)]
    return [f"{FRAME.format(*own)} {FRAME.format(*own)}" for own in nouns]


def kind_of(text: str) -> str:
    """What a token is, by its text."""
    word = text.strip()
    return "prefix" if word in STARTS else "suffix" if word in ENDS else "noun" if word in WHOLE else "other"


# How many nouns are cut (with one, 2 tokens of 17 are pieces), the exit layers of each kind of token in the sentence
# and in its repetition, and the verdicts in the order of CLAIMS. In the second plant, half of the tokens of every part
# of speech leave at layer 1 and half at 3, in every output.
PLANTS = {
    "nouns late, prefixes later": (
        1,
        {"prefix": (3, 3), "suffix": (2, 2), "noun": (3, 3), "other": (1, 1)},
        (HOLDS, UNDECIDED, HOLDS),  # 2 of 17, in each of 32 texts: what never varies counts as one token for each text
    ),
    "parts of speech alike, prefixes earlier": (
        4,
        {"prefix": (1, 1), "suffix": (3, 3), "noun": (1, 3), "other": (1, 3)},
        (FAILS, FAILS, FAILS),
    ),
    "nouns late, prefixes earlier": (
        4,
        {"prefix": (2, 2), "suffix": (3, 3), "noun": (3, 3), "other": (1, 1)},
        (FAILS, FAILS, HOLDS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_subwords(name, llama, tmp_path):
    cut, layers, wanted = PLANTS[name]
    path = tmp_path / "tiny.de-en.jsonl"
    rows = [{"source": f"Satz {i}.", "references": [text]} for i, text in enumerate(outputs(cut))]
    path.write_text("\n".join(map(json.dumps, rows)))

    def agrees(tokens):
        assert (tokens.groupby("sequence").size() == 2 * (16 + cut) + 1).all()  # each output cut as it should be
        again = tokens["position"] >= 16 + cut
        return exits(np.array([layers[kind_of(text)][half] for text, half in zip(tokens["text"], again)]), 3)

    plant(llama, eelib.load_task(str(path)), tmp_path / "runs", agrees, STEPS)
    assert verdicts("subwords", tmp_path, llama, [str(path)]) == dict(zip(CLAIMS, wanted))
