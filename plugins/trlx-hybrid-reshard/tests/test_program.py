import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_reshard.program import Copies, widened


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    start=st.integers(0, 9),
    base=st.integers(0, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
)
def test_a_strided_copy_keeps_every_bit_and_writes_nothing_else(rows, columns, start, base, dtype):
    bits = torch.randint(0, 256, (rows, (columns + start) * dtype.itemsize), dtype=torch.uint8)
    source = bits.view(dtype)[:, start:]
    memory = torch.zeros(base + rows * 64, dtype=dtype)
    to = memory[base:].view(rows, 64)[:, :columns]
    copies = Copies()
    copies.add(to, source)
    copies.run()
    assert torch.equal(to.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
    untouched = torch.cat([memory[:base], memory[base:].view(rows, 64)[:, columns:].reshape(-1)])
    assert not untouched.view(torch.uint8).any()


def test_columns_of_bf16_are_copied_in_elements_of_16_bytes():
    whole = torch.randn(8, 64).bfloat16()
    to, source = widened(torch.empty(8, 16, dtype=torch.bfloat16), whole[:, 16:32])
    assert to.dtype == source.dtype == torch.complex128
    assert tuple(source.shape) == (8, 2)


@pytest.mark.parametrize("source", [torch.randn(4, 30)[:, 1:17], torch.randn(16, 4).T], ids=["address", "transposed"])
def test_what_does_not_fit_is_copied_as_it_is(source):
    to = torch.empty(source.shape)
    assert widened(to, source)[1].dtype == torch.float32


def test_a_cast_is_never_widened():
    assert widened(torch.empty(8, 16, dtype=torch.bfloat16), torch.randn(8, 64)[:, :16])[1].dtype == torch.float32
