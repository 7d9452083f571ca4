"""Weights in float16 under AdamW."""

import torch
from trlx_hybrid.errors import SyncError
from trlx_hybrid.testing.models import tiny_model

from .rig import apart, trained, weights

NUMBER = "How far four steps at a learning rate of 1e-5 move weights in float16 (right: 4e-5 at most)"


def measure(library):
    model = tiny_model(dtype=torch.float16)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    try:
        with trained(library, model, steps=4, learning_rate=1e-5, optim="adamw_torch_fused") as trainer:
            return apart(before, weights(trainer))
    except SyncError:
        return "an error after step 2"


def right(found):
    return isinstance(found, str)
