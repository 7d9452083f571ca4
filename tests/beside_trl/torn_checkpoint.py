"""A run that died behind step 2 is started again (`resume_from_checkpoint=True`), and its last checkpoint is torn."""

import shutil

from .rig import apart, folder, trained, weights

NUMBER = "Difference to the run that was not stopped, where the last checkpoint has no optimizer; is cut"
SETTINGS = {"save_strategy": "steps", "save_steps": 1, "use_vllm": False, "optim": "adamw_torch", "steps": 3}


def without_optimizer(checkpoint):
    (checkpoint / "optimizer.pt").unlink()


def cut(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def restarted(library, tear):
    with folder() as path:
        with trained(library, output_dir=path, **SETTINGS) as whole:
            end = weights(whole)
        shutil.rmtree(path / "checkpoint-3")
        tear(path / "checkpoint-2")
        try:
            with trained(library, output_dir=path, resume=True, **SETTINGS) as again:
                return apart(end, weights(again))
        except Exception as error:
            return f"{type(error).__name__} at each start"


def measure(library):
    return [restarted(library, tear) for tear in (without_optimizer, cut)]


def right(found):
    return found == [0.0, 0.0]
