"""A run that is resumed at each of its steps, against the run that was never stopped."""

from trlx_hybrid.testing.models import sorting_prompts

from .rig import apart, folder, trained, weights

NUMBER = "Difference to the run that was not stopped, of one resumed in its second epoch; within a rollout"
CASES = {
    "epoch": ({"train_dataset": sorting_prompts(4)}, 3),
    "rollout": ({"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4}, 2),
}


def measure(library):
    found = []
    for settings, stop in CASES.values():
        settings = {"save_strategy": "steps", "save_steps": 1, "use_vllm": False, "steps": 5} | settings
        with folder() as path:
            with trained(library, output_dir=path / "whole", **settings) as whole:
                end = weights(whole)
            checkpoint = str(path / "whole" / f"checkpoint-{stop}")
            with trained(library, output_dir=path / "again", resume=checkpoint, **settings) as again:
                found.append(apart(end, weights(again)))
    return found


def right(found):
    return found == [0.0, 0.0]
