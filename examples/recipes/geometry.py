"""Geometry questions about pictures for a trainer: prompts of lmms-lab/multimodal-open-r1-8k-verified."""

ASKED = "Reason first, inside <think> and </think>. Then answer, with the final result in \\boxed{}."
LARGEST = 512  # pixels of a side: larger pictures take thousands of tokens


def with_prompts(dataset):
    """Return the columns `prompt`, `image` and `solution`, of the rows with small pictures."""

    def prepared(row):
        prompt = [{"role": "system", "content": ASKED}, {"role": "user", "content": row["problem"]}]
        return {"prompt": prompt, "image": row["image"].convert("RGB")}

    small = dataset.filter(lambda row: max(row["image"].size) <= LARGEST)
    return small.map(prepared, remove_columns=[c for c in small.column_names if c not in ("image", "solution")])
