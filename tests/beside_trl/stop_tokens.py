"""`stop_token_ids` with `mask_truncated_completions`: rows that stop have ended properly."""

from .rig import logged, trained

NUMBER = "Gradient norm where all rows end by `stop_token_ids`, with `mask_truncated_completions`"


def measure(library):
    settings = {"mask_truncated_completions": True, "max_completion_length": 64, "vllm_max_model_length": 96}
    settings |= {"generation_kwargs": {"stop_token_ids": list(range(50, 98))}}
    with trained(library, **settings) as trainer:
        return logged(trainer, "grad_norm")[0]


def right(found):
    return found > 0.1
