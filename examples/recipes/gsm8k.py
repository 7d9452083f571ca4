"""GSM8K for a trainer: prompts of openai/gsm8k, and a reward that reads the last message."""

import re

ASKED = "Reason step by step, and put the final answer in \\boxed{}."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def with_prompts(dataset):
    """Return the columns `prompt` and `solution`, made of `question` and `answer`."""

    def prepared(row):
        prompt = [{"role": "user", "content": f"{row['question']}\n{ASKED}"}]
        return {"prompt": prompt, "solution": row["answer"].rpartition("####")[2].strip().replace(",", "")}

    return dataset.map(prepared, remove_columns=["question", "answer"])


def last_number(completions, solution, **columns):
    """Return 1 where the last number of the last message is the solution, else 0. For conversations with tools."""
    said = [NUMBER.findall(messages[-1].get("content") or "") for messages in completions]
    return [
        float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(right))
        for numbers, right in zip(said, solution, strict=True)
    ]
