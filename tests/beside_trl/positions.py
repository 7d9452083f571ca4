"""GPT-2 counts positions from the start of the padded row."""

import torch
from trlx_hybrid.testing.models import tiny_model

from .rig import trained

NUMBER = "Error in nats of a row that GPT-2 scores beside a longer prompt"
SHORT, LONG, SAID = [10, 11, 12], list(range(20, 31)), [60, 61, 62, 63]


def measure(library):
    model = tiny_model("gpt2")
    with trained(library, model, steps=0) as trainer:
        padding = len(LONG) - len(SHORT)
        ids = torch.tensor([[0] * padding + SHORT + SAID, LONG + SAID])
        mask = torch.tensor([[0] * padding + [1] * len(SHORT + SAID), [1] * len(LONG + SAID)])
        with torch.no_grad():
            beside = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, len(SAID))[0][0]
            logits = model(input_ids=ids[:1, padding:]).logits[0, len(SHORT) - 1 : -1]
        alone = logits.log_softmax(-1).gather(-1, torch.tensor(SAID)[:, None])[:, 0]
        return float((beside - alone).abs().max())


def right(found):
    return found < 1e-4
