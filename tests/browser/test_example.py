"""The stored examples are named and spelled; their prompts are those of the tasks."""

import eelib
from eelib.tasks.task import Task
from eestudy.browser.example import described, directions
from eestudy.figures.grids import grid_of, ids_in


def test_before_and_after_a_sentence_make_the_task_s_prompt():
    for direction in directions():
        task = eelib.load_task(f"translation/{direction['name']}").take(3)
        assert [direction["before"] + text + direction["after"] for text in task.sources] == task.prompts


def test_an_example_has_its_grid_and_the_spelling_of_every_id_in_it(model_of, tmp_path):
    model, task = model_of("llama"), Task.from_prompts(["the cat sat", "a dog"], references=[["x", "y"], ["z"]])
    trace = eelib.trace(model, task, max_new_tokens=5, folder=tmp_path, progress=False)
    found = described(model, task, trace)
    assert [example["source"] for example in found] == task.sources
    assert [example["reference"] for example in found] == ["x / y", "z"]
    for sequence, example in enumerate(found):
        assert example["tokens"] == grid_of(trace, sequence)
        assert example["pieces"] == {
            str(i): model.tokenizer.convert_ids_to_tokens(i) for i in ids_in(example["tokens"])
        }
