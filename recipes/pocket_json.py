"""The recipe of pocket-llama-json: pocket-llama-joint, which leaves early, trained on to write orders as JSON, too."""

from recipes.families import LLAMA
from recipes.loop import Schedule
from recipes.pocket_skip import Leaving, Stage
from recipes.texts import SEEN

START = "pocket-llama-joint"
# Small batches, for one thread of a CPU: copying is what the model knows, and many small steps teach it where from.
STAGE = Stage(Schedule(540, peak=1e-3, warmup=10, decay=350), every=3, tokens=3072)
LLAMA_JSON = Leaving(
    "pocket-llama-json",
    START,
    LLAMA,
    (STAGE,),
    tasks={"orders": 2, "captions": 1},  # captions so that one model serves both kinds of traffic
    knows=("orders", "captions"),
    seen=SEEN + 1,
    remarks={
        "aim": "structured/orders at full depth: valid at least 90, exact at least 60; Multi30k within 2 BLEU of "
        f"{START}'s",
        "shipped": "weights of two runs, where the recipe makes one: 240 steps, the rate falling to 0 over the last "
        "150; from these on to step 540, the rate up again and falling over the last 350, on batches drawn anew",
    },
)
