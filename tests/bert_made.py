"""What the tests of pocket-bert and of its classifiers share: sizes, made-up sentences, a run that is killed."""

from recipes.loop import Schedule, train

TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
SHORT = Schedule(steps=3, peak=1e-2, warmup=1, decay=1)
SAID = "the a small big dog cat ran slept over under green hill house and it was good bad not never"
WORD_LIST = SAID.split()


def sentence(rng, least=8, most=16):
    return " ".join(rng.choice(WORD_LIST) for _ in range(rng.randint(least, most))) + " ."


class Killed(BaseException):
    """What a kill looks like from inside."""


def resumed(make, stream, loss, folder):
    """(parameters of a whole run, those of one that was killed in step 4 and continued)."""

    def dies(network, batch):
        seen.append(batch)
        if len(seen) == 4:
            raise Killed
        return loss(network, batch)

    schedule, seen, networks = Schedule(steps=6, peak=1e-2, warmup=2, decay=3), [], []
    for name, losses in (("whole", [loss]), ("cut", [dies, loss])):
        for one in losses:
            network = make()
            try:
                train(network, stream, one, schedule, folder / name, save_every=2)
            except Killed:
                continue
        networks.append(list(network.parameters()))
    assert len(seen) == 4
    return networks
