"""Train a shipped model again: python -m recipes NAME --corpora DIR; or a model's gates: gates --model NAME."""

import argparse
import dataclasses
import json
import pkgutil
import sys
from pathlib import Path

from eelib.common.errors import InputError
from eelib.common.files import data_folder
from recipes import gates

# Where the recipe of each model is: a module, or an object in one; both have `run` and `measure`.
RECIPES = {
    "minilm-cola": "minilm:COLA",
    "minilm-cola-joint": "minilm:COLA_JOINT",
    "minilm-mrpc": "minilm:MRPC",
    "minilm-mrpc-joint": "minilm:MRPC_JOINT",
    "minilm-rte": "minilm:RTE",
    "minilm-rte-joint": "minilm:RTE_JOINT",
    "minilm-sst2": "minilm:SST2",
    "minilm-sst2-joint": "minilm:SST2_JOINT",
    "pocket-llama": "pocket_llama",
    "pocket-llama-joint": "fine_tuning:LLAMA_JOINT",
    "pocket-llama-json": "fine_tuning:LLAMA_JSON",
    "pocket-t5": "pocket_t5",
    "pocket-t5-free": "fine_tuning:T5_FREE",
    "pocket-t5-weighted": "fine_tuning:T5_WEIGHTED",
    "pocket-tagger": "pocket_tagger",
    "smollm2-135m-instruct-block": "smollm2:BLOCK",
    "smollm2-135m-instruct-features": "smollm2:FEATURES",
    "smollm2-135m-instruct-joint": "smollm2:JOINT",
    "smollm2-135m-instruct-lens": "tuned_lens:SMOLLM2_LENS",
    "smollm2-135m-instruct-outputs": "smollm2:OUTPUTS",
}


def main(arguments: list[str] | None = None) -> None:
    """Train one of this project's models, continuing where a run stopped, measure it, and write its card."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gates"]:
        gates.main(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description=main.__doc__,
        epilog="gates --help: the trained gates of any model",
    )
    parser.add_argument("name", choices=sorted(RECIPES), help="which model")
    parser.add_argument("--corpora", type=Path, required=True, help="folder of the files that recipes/texts.py names")
    parser.add_argument("--out", type=Path, help="where the model goes (default: data/models/NAME)")
    parser.add_argument("--work", type=Path, help="checkpoints (default: checkpoints/NAME)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--minutes", type=float, help="of one leg, for a recipe that is trained in legs")
    parser.add_argument("--measure", action="store_true", help="do not train; print the quality of the model in --out")
    given = parser.parse_args(arguments)
    if not given.corpora.is_dir():
        parser.error(f"--corpora {given.corpora} is not a folder")
    out = given.out or data_folder("models", given.name)
    recipe = pkgutil.resolve_name(f"recipes.{RECIPES[given.name]}")
    work = given.work or Path("checkpoints") / given.name
    in_legs = hasattr(recipe, "minutes")
    if given.minutes is not None:
        if not in_legs:
            parser.error(f"{given.name} is not trained in legs, so it takes no --minutes")
        recipe = dataclasses.replace(recipe, minutes=given.minutes)
    if given.measure and not out.is_dir():
        parser.error(f"there is no model in {out}; give the one to measure with --out")
    try:
        if given.measure:
            more = [work] if in_legs else []  # beside it are the outputs that such a recipe needs
            print(json.dumps(recipe.measure(given.corpora, out, given.device, *more), indent=1))
        else:
            recipe.run(given.corpora, out, work, given.device)
    except (InputError, FileNotFoundError) as error:  # such as a part of the corpora
        parser.error(str(error))


if __name__ == "__main__":
    main()
