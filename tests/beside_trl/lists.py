"""A tool that returns a list of texts, in Qwen3's chat template."""

from datasets import Dataset
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

from .rig import trained

NUMBER = "Words of `['Paris', 'Berlin']`, returned by a tool, that the model is shown"
TURNS = ['<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>', "a plain answer"]
QUESTIONS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"question {i}"}] for i in range(16)]})


def search(query: str) -> list:
    """Search.

    Args:
        query: what.
    """
    return ["Paris", "Berlin"]


def conversing(library, tools, **given):
    """A run of one step whose model calls a tool in most rows."""
    tokenizer = chat_tokenizer(TURNS)
    settings = {"max_completion_length": 300, "vllm_max_model_length": 2048, "max_tool_calling_iterations": 2} | given
    settings |= {"processing_class": tokenizer, "train_dataset": QUESTIONS, "tools": tools}
    return trained(library, chatty_model(tokenizer, TURNS), **settings)


def measure(library):
    tokenizer, texts = chat_tokenizer(TURNS), []

    def reads(completion_ids, **columns):
        texts.extend(tokenizer.decode(ids) for ids in completion_ids)
        return [float(len(ids) % 5) for ids in completion_ids]

    with conversing(library, [search], reward_funcs=reads):
        answered = [text for text in texts if "tool_response" in text]
    return sum(word in answered[0] for word in search(""))


def right(found):
    return found == 2
