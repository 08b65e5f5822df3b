"""A tiny tokenizer, and prompts for it, for checkpoints that are made on the spot."""

import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, END, START, MASK = "<pad>", "</s>", "<s>", "<mask>"
WINDOW = 128
LINES = [
    "The small dog ran over the green hill.",
    "Der kleine Hund lief über den grünen Hügel.",
    "Wo ist das Buch? Here!",
    "a quick test 😀 of café and naïve words",
    "one two three, four; five.\n",
]
PROMPTS = [
    "The small dog",
    "Wo ist das Buch? Here, over the hill!",
    "a",
    "one two three four five, café 😀",
    "Der kleine",
]


def tokenizer_for(kind: str) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE of 300 entries; like the real ones, encoders end their input and masked models frame it.

    A new one each time, since a test may change its window.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[PAD, END, START, MASK],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    frame = {"causal": "$A", "seq2seq": f"$A {END}", "masked": f"{START} $A {END}"}[kind]
    bpe.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[(t, bpe.token_to_id(t)) for t in (START, END)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        bos_token=START,
        mask_token=AddedToken(MASK, special=True),
        model_max_length=WINDOW,
    )
