"""What the tests of rows in flight keep of a run: the trajectories of each batch, and the weights of each version."""

import copy

from transformers import TrainerCallback
from trlx_hybrid import hookimpl


class Trajectories:
    """A plugin that keeps the trajectories of each batch that is trained."""

    def __init__(self):
        self.batches = []

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        if session.training:
            self.batches.append(list(trajectories))


class Weights(TrainerCallback):
    """Keeps the weights of every version."""

    def __init__(self):
        self.of_version = []

    def on_step_begin(self, *args, model, **kwargs):
        self.of_version.append(copy.deepcopy(model.state_dict()))
