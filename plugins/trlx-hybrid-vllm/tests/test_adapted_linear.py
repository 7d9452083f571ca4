"""A layer with its adapter in one product and one kernel, in Triton's interpreter where there is no GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from interpreting import interpreted

INTERPRETED = """
from trlx_hybrid_vllm.private.adapted_linear import with_b, with_b_in_torch

for tokens, sizes, rank, dtype, biased in (
    (1, [64], 16, torch.float32, False),
    (17, [70, 10, 20], 16, torch.float32, True),
    (70, [136, 64], 48, torch.float32, False),
    (5, [64, 3, 130, 1], 8, torch.float32, True),
    (33, [136], 16, torch.float16, True),  # the interpreter's products of bfloat16 are wrong
):
    rows = sum(sizes)
    product = torch.randn(tokens, rows + len(sizes) * rank + 5).to(dtype)
    b = torch.randn(rows, rank).to(dtype)
    bias = torch.randn(rows).to(dtype) if biased else None
    found = with_b(product, b, sizes, bias)
    expected = with_b_in_torch(product.double(), b.double(), sizes, bias.double() if biased else None)
    assert found.is_contiguous() and found.dtype == dtype and found.shape == (tokens, rows)
    apart = (found.double() - expected).abs().max() / expected.abs().max()
    assert apart <= 4 * torch.finfo(dtype).eps, (tokens, sizes, rank, dtype, apart)
print("equal")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here")
def test_the_kernel_adds_what_torch_adds():
    said, errors = interpreted(INTERPRETED)
    assert said.endswith("equal\n"), errors[-4000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_this_gpu():
    from trlx_hybrid_vllm.private.adapted_linear import runs_here

    assert runs_here()


def test_the_weight_and_its_adapter_are_one_product():
    """Of three fused layers, each with an adapter of its own, against what each computes alone."""
    from trlx_hybrid_vllm.private.adapted_linear import adapted_linear, spare_rows

    torch.manual_seed(0)
    sizes, rank, columns = [5, 3, 4], 3, 7
    rows, spare = sum(sizes), spare_rows(len(sizes), rank)
    assert spare == 16
    joined, b = torch.zeros(rows + spare, columns, dtype=torch.float64), torch.zeros(rows, rank, dtype=torch.float64)
    above, expected = 0, []
    x, bias = torch.randn(2, 6, columns, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    for number, size in enumerate(sizes):
        weight, a = torch.randn(size, columns, dtype=torch.float64), torch.randn(rank, columns, dtype=torch.float64)
        part = torch.randn(size, rank, dtype=torch.float64)
        joined[above : above + size], joined[rows + number * rank : rows + (number + 1) * rank] = weight, a
        b[above : above + size] = part
        expected.append(x @ weight.T + x @ a.T @ part.T)
        above += size
    found = adapted_linear(x, joined, b, sizes, bias)
    torch.testing.assert_close(found, torch.cat(expected, -1) + bias, rtol=1e-12, atol=1e-12)
    if not torch.cuda.is_available():  # the operator is of the platform's devices
        operator = torch.ops.trlx_hybrid.adapted_linear
        torch.library.opcheck(operator, (x, joined, b, sizes, bias), test_utils="test_faketensor")
