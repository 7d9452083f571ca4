"""A temperature in `generation_kwargs`, which the engine samples at."""

from .rig import logged, trained

NUMBER = "Error in nats between engine and trainer, with a temperature of 0.5 in `generation_kwargs`"


def measure(library):
    with trained(library, generation_kwargs={"temperature": 0.5}) as trainer:
        return logged(trainer, "sampling/sampling_logp_difference/max")[0]


def right(found):
    return found < 1e-3
