"""Every enabled model of the study through every notebook, then the book: `make book`, or snakemake anywhere."""

import os
import re
import sys
from pathlib import Path

from eestudy.book.study_file import LENS, StudyFile
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
# A thread that waits for another sleeps: spinning, two threads are many times slower than one on cores that others use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SLURM = config.get("cluster") == "slurm"  # says its GPUs as that executor names them
PAGES = [f"book/results/{model}/{notebook}.ipynb" for model, notebook in STUDY.runs]
RESULTS = [f"results/{model}/{notebook}.json" for model, notebook in STUDY.runs]
HTML = ["book/_build/html/index.html", *(f"book/_build/html/{page}.html" for page in STUDY.pages)]

LENS_SCRIPTS = "book/generated/scripts/lens"


def one_of(names):
    """A pattern of these names; of nothing where there are none."""
    return "|".join(map(re.escape, sorted(names))) or "(?!)"


def setting(name, otherwise=0):
    """A resource from a model's settings."""
    return lambda wildcards: STUDY.models[wildcards.model].get(name, otherwise)


def usual(resource, otherwise):
    """What the profile or the command line gives jobs; a model that names none gets it where another one names its own."""
    given = (workflow.resource_settings.default_resources or {}).get(resource)
    return otherwise if given is None else given.raw


RESOURCES = {
    "mem_mb": lambda wildcards: STUDY.host_memory(wildcards.model) * 1024,  # memory_gb is a GPU's figure, where there is one
    "cards": setting("gpu"),
}
if SLURM:  # --gres, --time, --partition; where no model says so, the profile does, or the cluster

    onstart:  # a job that never starts leaves the log of an earlier run, which would pass for its own
        for log_of_before in Path("logs").rglob("*.log"):
            log_of_before.replace(f"{log_of_before}.before")

    RESOURCES["gres"] = lambda wildcards: f"gpu:{n}" if (n := STUDY.models[wildcards.model].get("gpu")) else ""
    RESOURCES["runtime"] = lambda wildcards: STUDY.models[wildcards.model].get("hours", 0) * 60 or usual("runtime", 1440)
    RESOURCES["slurm_partition"] = setting("partition", usual("slurm_partition", ""))
    for asked, resource in (("gpu", "gres"), ("hours", "runtime"), ("partition", "slurm_partition")):
        if not any(asked in settings for settings in STUDY.models.values()):
            RESOURCES.pop(resource)
else:
    RESOURCES["gpu"] = setting("gpu")


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
        LENS_SCRIPTS if os.path.exists("book/lens.md") else [],
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
        "( python -m eestudy.book.fragments --study {params.study:q}"
        " && rm -rf book/_build"  # a cached page would hide its warnings
        " && jupyter-book build book --config _config.yml --path-output book -n -W --keep-going ) 2>&1 | tee {log:q}"


rule lens:
    input:
        STUDY.lens_sources(),
    output:
        directory(LENS_SCRIPTS),
    log:
        "logs/lens.log",
    params:
        model=LENS,
    message:
        "the model for the page with the lens"
    shell:
        "OMP_NUM_THREADS=1 python -m eestudy.browser {params.model:q} {output:q} 2>&1 | tee {log:q}"


rule results:
    input:
        PAGES,
        RESULTS,


rule traces:  # by workers that share out the shards among themselves; whoever is killed, the others go on
    input:
        lambda wildcards: STUDY.worker_sources(wildcards.model),
    output:
        touch("logs/{model}/traces-{worker}.made"),
    log:
        "logs/{model}/traces-{worker}.log",
    params:
        study=STUDY.path,
        asked=lambda wildcards: STUDY.asked(wildcards.model),  # a change makes traces
        local=lambda wildcards: [STUDY.local_files(wildcards.model, name) for name in STUDY.notebooks_of(wildcards.model)],
    wildcard_constraints:
        worker="[0-9]+",
    threads: setting("threads", STUDY.threads)
    retries: 1
    resources:
        **RESOURCES,
    message:
        "traces of {wildcards.model}, worker {wildcards.worker}"
    shell:
        "OMP_NUM_THREADS={threads} python -m workflow.gpus {resources.cards}"
        " python -m eestudy.book.worker --study {params.study:q} --model={wildcards.model:q} 2>&1 | tee {log:q}"


rule notebook:
    input:
        lambda wildcards: STUDY.notebook_sources(wildcards.model, wildcards.notebook),
        lambda wildcards: [
            ancient(f"logs/{wildcards.model}/traces-{worker}.made") for worker in range(setting("workers")(wildcards))
        ],
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
    threads: setting("threads", STUDY.threads)
    retries: 1  # two kernels that start at the same moment may take the same port, and one dies
    resources:
        **RESOURCES,
    message:
        "{wildcards.notebook} on {wildcards.model}"
    shell:
        "OMP_NUM_THREADS={threads} python -m workflow.gpus {resources.cards}"
        " papermill notebooks/{wildcards.notebook:q}.ipynb {params.draft:q} -k python3 {params.values}"
        " 2>&1 | tee {log:q} && mv {params.draft:q} {output.page:q}"


use rule notebook as first_notebook with:
    wildcard_constraints:
        notebook=one_of(STUDY.first),
    priority: 1
