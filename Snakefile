"""Every enabled model of the study through every notebook, then the book: `make book`, or snakemake anywhere."""

import os
import re
import sys

from eelib.book.study_file import StudyFile
from eelib.common.errors import InputError

try:
    STUDY = StudyFile.load(config.get("study", "study.yml"))
except InputError as error:
    sys.exit(str(error))
os.environ |= {
    "PYTHONHASHSEED": "0",
    "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel of this environment, not one in the user's home
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PAGES = [f"book/results/{model}/{notebook}.ipynb" for model, notebook in STUDY.runs]
RESULTS = [f"results/{model}/{notebook}.json" for model, notebook in STUDY.runs]
HTML = ["book/_build/html/index.html", *(f"book/_build/html/{page}.html" for page in STUDY.pages)]


def one_of(names):
    """A pattern of these names; of nothing where there are none."""
    return "|".join(map(re.escape, sorted(names))) or "(?!)"


wildcard_constraints:
    model=one_of(STUDY.models),


localrules:
    all,
    book,


rule all:
    input:  # the first two by name: Snakemake does not miss a file from which everything has been made already
        PAGES,
        RESULTS,
        HTML,


rule book:
    input:
        PAGES,
        RESULTS,
        STUDY.page_sources(),
    output:
        HTML,
    log:
        "logs/book.log",
    params:
        study=STUDY.path,
    message:
        "building the book"
    shell:
        "( python -m eelib.book --study {params.study:q}"
        " && rm -rf book/_build"  # a cached page would hide its warnings
        " && jupyter-book build book --config _config.yml --path-output book -n -W --keep-going ) 2>&1 | tee {log:q}"


rule results:
    input:
        PAGES,
        RESULTS,


rule notebook:
    input:
        lambda wildcards: STUDY.notebook_sources(wildcards.model, wildcards.notebook),
    output:
        page="book/results/{model}/{notebook}.ipynb",
        results="results/{model}/{notebook}.json",
    log:
        "logs/{model}/{notebook}.log",
    params:
        draft="logs/{model}/{notebook}.ipynb",  # stays there when the notebook fails
        values=lambda wildcards: STUDY.arguments(wildcards.model, wildcards.notebook),
        local=lambda wildcards: STUDY.local_files(wildcards.model, wildcards.notebook),  # a change runs the notebook
    wildcard_constraints:
        notebook=one_of(set(STUDY.notebooks) - set(STUDY.first)),
    threads: lambda wildcards: STUDY.threads_of(wildcards.model)
    resources:
        mem_mb=lambda wildcards: STUDY.models[wildcards.model].get("memory_gb", 4) * 1024,
        gpu=lambda wildcards: STUDY.models[wildcards.model].get("gpu", 0),
    message:
        "{wildcards.notebook} on {wildcards.model}"
    shell:
        "OMP_NUM_THREADS={threads}"
        " papermill notebooks/{wildcards.notebook:q}.ipynb {params.draft:q} -k python3 {params.values}"
        " 2>&1 | tee {log:q} && mv {params.draft:q} {output.page:q}"


use rule notebook as first_notebook with:
    wildcard_constraints:
        notebook=one_of(STUDY.first),
    priority: 1
