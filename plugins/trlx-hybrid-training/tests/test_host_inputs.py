"""Inputs of recomputed layers in host memory: the same bits come back, and the memory is used again."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trlx_hybrid.errors import MemoryPlanError
from trlx_hybrid.memory.arena import Arena
from trlx_hybrid_training.host_inputs import HostInputs

LAYERS, ROWS, COLUMNS = 5, 300, 7


@pytest.fixture
def host():
    inputs = HostInputs(torch.device("cpu"))
    yield inputs
    gc.collect()
    assert inputs._arena.bytes_taken == 0
    inputs.close()


def through(layers, x, host=None, reentrant=False):
    for layer in layers:
        call = {"use_reentrant": reentrant}
        x = checkpoint(layer, x, **call) if host is None else host.keeping(checkpoint, layer, x, **call)
    if host is not None:
        host.settle()
    return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_same_bits(host, dtype, reentrant):
    layers = [nn.Sequential(nn.Linear(COLUMNS, COLUMNS, dtype=dtype), nn.Tanh()) for _ in range(LAYERS)]
    found = []
    for where in (None, host):
        for layer in layers:
            layer.zero_grad()
        x = torch.linspace(-1, 1, ROWS * COLUMNS, dtype=dtype).view(1, ROWS, COLUMNS).requires_grad_()
        through(layers, x, where, reentrant).square().sum().backward()
        found.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    assert all(map(torch.equal, *found))


def test_nothing_of_an_input_stays_with_the_graph(host):
    layers = [nn.Linear(COLUMNS, COLUMNS) for _ in range(LAYERS)]
    left = []

    def watched(layer):
        def call(x):
            left.append(x.data_ptr())
            return layer(x)

        return call

    x = torch.ones(1, ROWS, COLUMNS, requires_grad=True)
    out = through([watched(layer) for layer in layers], x, host)
    assert host._arena.bytes_taken >= LAYERS * x.nbytes
    gc.collect()
    alive = {t.data_ptr() for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.numel() == x.numel()}
    assert alive & set(left) <= {x.data_ptr(), out.data_ptr()}


def test_a_graph_without_a_backward_pass_gives_its_memory_back(host):
    layers = [nn.Linear(COLUMNS, COLUMNS) for _ in range(LAYERS)]
    for _ in range(3):
        out = through(layers, torch.ones(1, ROWS, COLUMNS, requires_grad=True), host)
        assert host._arena.bytes_taken
        del out
        gc.collect()
        assert host._arena.bytes_taken == 0
    assert host.bytes == host._arena._chunk_bytes  # one chunk for all of them


def test_a_second_backward_pass_finds_the_inputs_again(host):
    layers = [nn.Linear(COLUMNS, COLUMNS) for _ in range(LAYERS)]
    x = torch.ones(1, ROWS, COLUMNS, requires_grad=True)
    out = through(layers, x, host).sum()
    (once,) = torch.autograd.grad(out, x, retain_graph=True)
    (twice,) = torch.autograd.grad(out, x)
    assert torch.equal(once, twice)
    del out


def test_a_layer_that_gets_its_input_by_name_keeps_it_on_the_device(host):
    layer = nn.Linear(COLUMNS, COLUMNS)
    x = torch.ones(1, ROWS, COLUMNS, requires_grad=True)
    host.keeping(checkpoint, lambda: layer(x), use_reentrant=False).sum().backward()
    assert host.bytes == 0
    assert x.grad is not None


def test_inputs_stay_on_the_device_where_the_host_has_no_memory(host, monkeypatch, caplog):
    def full(arena, sizes):
        raise MemoryPlanError("The host gives no more.", owner="host arena")

    monkeypatch.setattr(Arena, "take", full)
    layers = [nn.Linear(COLUMNS, COLUMNS) for _ in range(LAYERS)]
    x = torch.ones(1, ROWS, COLUMNS, requires_grad=True)
    through(layers, x, host).sum().backward()
    assert x.grad is not None
    assert [r.message for r in caplog.records] == ["Inputs of layers stay on the device: The host gives no more."]
