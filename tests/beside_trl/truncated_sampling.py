"""`top_k=50` over rows of 200 tokens."""

from trlx_hybrid.testing.models import tiny_model

from .rig import logged, trained

NUMBER = "Importance ratio of rows of 200 tokens under `top_k=50` (right: 1)"


def measure(library):
    settings = {"top_k": 50, "max_completion_length": 200, "vllm_max_model_length": 240}
    settings |= {"generation_kwargs": {"ignore_eos": True}}
    with trained(library, tiny_model(max_position_embeddings=512), **settings) as trainer:
        return logged(trainer, "sampling/importance_sampling_ratio/mean")[0]


def right(found):
    return abs(found - 1) < 1e-3
