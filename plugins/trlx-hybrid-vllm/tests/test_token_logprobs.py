"""Log-probs of sampled tokens from kernels of our own, in Triton's interpreter where there is no GPU."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from interpreting import interpreted

INTERPRETED = """
from trlx_hybrid_vllm.private import token_logprobs as ours
from vllm.v1.outputs import LogprobsTensors

float32, bfloat16 = torch.float32, torch.bfloat16
for rows, vocabulary, dtype in ((1, 5, float32), (3, 4096, float32), (4, 9001, float32), (2, 4097, bfloat16)):
    wide = (torch.randn(rows, vocabulary + 3) * 8).to(dtype)
    logits = wide[:, :vocabulary]  # rows with a stride of their own
    logits[0, : vocabulary // 2] = float("-inf")  # as a mask of allowed tokens leaves them
    tokens = torch.randint(vocabulary // 2, vocabulary, (rows,))
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    apart = (ours.token_logprobs(logits, tokens).double() - expected).abs().max()
    assert apart <= torch.finfo(float32).eps * expected.abs().max(), (rows, vocabulary, dtype, apart)
masked = torch.full((1, 3 * 4096), float("-inf"))
masked[0, 7] = 2.0
assert ours.token_logprobs(masked, torch.tensor([7])).tolist() == [0.0]  # blocks without any token
assert ours.token_logprobs(masked, torch.tensor([9000])).tolist() == [float("-inf")]

asked = []
scores = ours.scores_like(lambda *given, **options: asked.append((given[1:], options)) or "vllm")
logits, sampled = torch.randn(2, 50), torch.tensor([3, 4])
found = scores(logits, 0, sampled, None, logprob_token_ids_state=None, max_per_req_token_ids=0, logits_mode=False)
assert isinstance(found, LogprobsTensors) and found.logprob_token_ids.tolist() == [[3], [4]]
torch.testing.assert_close(found.logprobs[:, 0], torch.log_softmax(logits, -1)[[0, 1], sampled])
for given, options in (((2, sampled), {}), ((0, sampled, [0, 1, 2]), {}), ((0, sampled), {"max_per_req_token_ids": 1}),
                       ((0, sampled), {"logits_mode": True})):
    assert scores(logits, *given, **options) == "vllm"
assert len(asked) == 4
print("equal")
"""


def test_they_are_those_of_a_log_softmax():
    said, errors = interpreted(INTERPRETED)
    assert said.endswith("equal\n"), errors[-4000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_are_vllms_on_this_gpu():
    from trlx_hybrid_vllm.private.token_logprobs import equal_to_vllm

    assert equal_to_vllm(torch.device("cuda"))


def test_the_sampler_takes_what_is_patched():
    """vLLM's sampler looks the function up by its name, and gives the arguments that are known."""
    from vllm.v1.worker.gpu.sample import sampler

    called = re.search(r"= compute_topk_scores\((.*?)\n            \)", inspect.getsource(sampler), re.DOTALL)
    names = [line.strip().partition("=")[0].rstrip(",") for line in called[1].split("\n") if line.strip()]
    assert names[:4] == ["logits", "num_logprobs", "sampled", "cu_num_logits"]
    assert set(names[4:]) == {
        "logprob_token_ids_state",
        "expanded_idx_mapping",
        "max_per_req_token_ids",
        "logits_mode",
    }
