"""What tests of agents share."""

import pytest
from datasets import Dataset
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn.gateway import agents, episode_reward

from tests.support.agents import QUESTIONS, TURNS
from tests.support.in_flight import Trajectories


@pytest.fixture
def train(run, tmp_path):
    """Train with agents; returns the run and the trajectories of its batches."""

    def start(agent, **given):
        tokenizer, kept = chat_tokenizer(TURNS), Trajectories()
        options = {"progress": False} | given.pop("options", {})
        settings = {
            "max_steps": 2,
            "max_completion_length": 150,
            "vllm_max_model_length": 1024,
            "loss_type": "grpo",
            "train_dataset": Dataset.from_dict({"prompt": QUESTIONS}),
            "rollout_func": agents(agent) if callable(agent) and not hasattr(agent, "rollout") else agent,
            "reward_funcs": [episode_reward],
            "hybrid": {"engine": "vllm", "rollout_options": options},
        }
        model = given.pop("model", None) or chatty_model(tokenizer, TURNS)
        done = run(GRPOTrainer, model=model, processing_class=tokenizer, plugins=[kept], **settings | given)
        return done, kept.batches

    return start
