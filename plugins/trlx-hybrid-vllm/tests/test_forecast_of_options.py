"""What `HybridEngine` forecasts of an optimizer's state is what the optimizer then holds."""

import pytest
import torch
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "RMSprop, centered with momentum": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "SGD, momentum in one group": lambda p: torch.optim.SGD(
        [{"params": p[:3], "momentum": 0.9}, {"params": p[3:]}], lr=0.1
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_forecast_is_what_the_optimizer_holds_after_a_step(started_once, kind):
    model = tiny_model()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    config = HybridConfig(engine="vllm", engine_options={"max_model_len": 64, "max_num_seqs": 4})
    with HybridEngine(model, character_tokenizer(), optimizer, config=config, max_tokens=4) as engine:
        with engine.rollout_context():
            engine.generate([[5, 6, 7]])
        forecast = engine.session.memory.prediction.phases["train"]["optimizer"]
        with engine.train_context():
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        held = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        assert forecast == sum(t.nbytes for t in held)
