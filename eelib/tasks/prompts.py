"""The prompts of the paper (P, Table 8), word for word, one of our own, and what may be put into them."""

LANGUAGES = {
    "de": "German",
    "en": "English",
    "fr": "French",
    "ja": "Japanese",
    "ru": "Russian",
    "zh": "Chinese",
}
TRANSLATION = "### Instruction:\nTranslate {src} to {tgt}:\n### Input:\n{text}\n### Response:\n"
SUMMARIZATION = "### Instruction:\nSummarize the following article to a sentence:\n### Input:\n{text}\n### Response:\n"
QUESTION_ANSWERING = (
    "### Instruction:\nI will provide a context and a question to you. "
    "You need to answer me the question based on the context.\n"
    "### Context:\n{context}\n### Question:\n{question}\n### Answer:\n"
)
STRUCTURED = (
    "### Instruction:\nWrite the order as JSON:\n### Input:\n{note}\n### Response:\n"  # of our own, in P's form
)
# Template parts that a tokenizer trained here may hold as one piece each: the text stays the paper's, the cost falls.
FIXED_PARTS = (
    "### Instruction:\n",
    "\n### Input:\n",
    "\n### Response:\n",
    "\n### Context:\n",
    "\n### Question:\n",
    "\n### Answer:\n",
    "I will provide a context and a question to you. You need to answer me the question based on the context.",
)


def translation_prompt(text: str, source: str, target: str) -> str:
    """Prompt for one sentence; `source` and `target` are two-letter codes from `LANGUAGES` (P, Table 8)."""
    return TRANSLATION.format(src=LANGUAGES[source], tgt=LANGUAGES[target], text=text)


def summarization_prompt(text: str) -> str:
    """Prompt for one article (P, Table 8)."""
    return SUMMARIZATION.format(text=text)


def question_prompt(context: str, question: str) -> str:
    """Prompt for one question about one passage (P, Table 8)."""
    return QUESTION_ANSWERING.format(context=context, question=question)


def structured_prompt(note: str) -> str:
    """Prompt for one note whose order is wanted as JSON; our own."""
    return STRUCTURED.format(note=note)
