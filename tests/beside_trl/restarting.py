"""A restart (`resume_from_checkpoint=True`) in a folder that holds an earlier run's checkpoints as well."""

from .rig import apart, digits, folder, trained, weights

NUMBER = "Difference to the run that was not stopped, of one started again in a folder with an earlier run"
SAVING = {"save_strategy": "steps", "save_steps": 1, "use_vllm": False}


class Dies:
    """Ends the run in its second batch, as a kill would."""

    __name__ = "dies"
    calls = 0

    def __call__(self, **columns):
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        return digits(**columns)


def measure(library):
    own = SAVING | {"steps": 3, "learning_rate": 1e-3}
    with folder() as path:
        with trained(library, output_dir=path / "twin", **own) as twin:
            expected = weights(twin)
        with trained(library, output_dir=path / "run", steps=3, seed=1, **SAVING):
            pass  # an earlier run in the folder
        try:
            with trained(library, output_dir=path / "run", reward_funcs=Dies(), **own):
                pass
        except KeyboardInterrupt:
            pass
        with trained(library, output_dir=path / "run", resume=True, **own) as again:
            return apart(expected, weights(again))


def right(found):
    return found == 0.0
