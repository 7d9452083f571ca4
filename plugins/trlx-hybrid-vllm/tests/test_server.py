"""Weights on their way to other processes: packed into messages, described, and told apart by digests."""

import asyncio
import functools
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trlx_hybrid.contract.serving import ServerDiedError
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid.errors import ConfigError, EngineError, SyncError
from trlx_hybrid.plugins.selection import Choice, Selection
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.generate.support import ReturnedIds
from trlx_hybrid_vllm.options import TransferOptions
from trlx_hybrid_vllm.private.distributed import nccl_missing
from trlx_hybrid_vllm.remote.gloo import in_threads, messages, packed, unpacked
from trlx_hybrid_vllm.remote.sender import GroupClient, backend_of, init_info
from trlx_hybrid_vllm.remote.server import VLLMServer, model_folder
from trlx_hybrid_vllm.remote.worker import Routes, differing, digest
from vllm import EngineArgs, SamplingParams, envs
from vllm.distributed.weight_transfer import ParamMeta
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import SamplingMaskLists

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def described(draw):
    given = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12))
    return [ParamMeta(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(given)]


def filled(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype)


@given(described(), st.integers(1, 400))
def test_what_is_packed_comes_out_again(tensors, limit):
    values = [filled(t, i) for i, t in enumerate(tensors)]
    given, found = iter(values), []
    for described in messages(tensors, limit):
        message = packed(next(given) for _ in described)
        assert message.nbytes <= limit or len(described) == 1
        assert message.dtype == described[0].dtype
        assert message.dim() == 1
        found += unpacked(message, described)
    assert [name for name, _ in found] == [t.name for t in tensors]
    for (_, tensor), value in zip(found, values, strict=True):
        assert tensor.dtype == value.dtype
        assert torch.equal(tensor, value)


def test_no_message_could_have_held_the_next_tensor():
    tensors = [ParamMeta(f"t{i}", torch.float32, (i % 7,)) for i in range(50)]
    for message, after in itertools.pairwise(messages(tensors, 64)):
        assert 4 * sum(t.shape[0] for t in [*message, after[0]]) > 64


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_a_digest_tells_any_change_of_one_element_and_any_swap(size, seed, data):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(size, generator=generator)
    index = data.draw(st.integers(0, size - 1))
    bits = tensor.view(torch.int32).clone()
    bits[index] ^= 1 << data.draw(st.integers(0, 31))
    assert digest(bits) != digest(tensor)
    other = data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[[index, other]] = tensor[[other, index]]
    assert (digest(swapped) == digest(tensor)) == torch.equal(swapped, tensor)


def test_a_digest_is_of_bits_in_row_major_order_however_they_lie():
    tensor = torch.randn(6, 5)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan"), 1.0])
    assert digest(nan) == digest(nan.clone())


def test_a_digest_of_many_pieces_is_that_of_one(monkeypatch):
    tensor = torch.randn(1000)
    whole = digest(tensor)
    monkeypatch.setattr("trlx_hybrid_vllm.remote.worker.PIECE", 7)
    assert digest(tensor) == whole


# --- routes -----------------------------------------------------------------------------------------------------------


def route(dtype, shape, stride, offset):
    return [dtype, list(shape), list(stride), offset]


def two_workers(dtype="float32", unwritten=()):
    """A (4, 2) tensor "a" in halves of its rows, and "b" whole on both."""
    whole = route(dtype, (3,), (1,), 0)
    return [[[[route(dtype, (2, 2), (2, 1), 4 * r)], [whole]], list(unwritten)] for r in range(2)]


def test_digests_along_routes_find_the_tensor_and_only_that():
    routes = Routes.learned(["a", "b"], [two_workers(), two_workers()])
    weights = {"a": torch.randn(4, 2), "b": torch.randn(3)}
    expected = routes.digests(weights.items())
    answer = [[expected[name][rank] for name in weights] for rank in range(2)]
    assert differing(expected, [answer, answer]) == []
    changed = routes.digests({**weights, "a": weights["a"] + torch.eye(4)[:, :2] * 0.5}.items())
    wrong = [[changed["a"][0], expected["b"][0]], answer[1]]
    assert differing(expected, [answer, wrong]) == ["a"]


def test_what_engines_keep_in_a_narrower_dtype_is_sent_in_it():
    routes = Routes.learned(["a", "b"], [two_workers("bfloat16")])
    assert routes.wire({"a": torch.float32, "b": torch.bfloat16}) == {"a": torch.bfloat16}
    mixed = two_workers("bfloat16")
    mixed[1][0][0] = [route("float32", (2, 2), (2, 1), 4)]
    assert Routes.learned(["a", "b"], [mixed]).wire({"a": torch.float32, "b": torch.float32}) == {"b": torch.bfloat16}


def test_engines_that_keep_weights_differently_or_not_at_all_are_refused():
    with pytest.raises(SyncError, match="different layouts"):
        Routes.learned(["a", "b"], [two_workers(), two_workers("bfloat16")])
    with pytest.raises(SyncError, match=r"unwritten: model\.norm\.weight"):
        Routes.learned(["a", "b"], [two_workers(unwritten=["model.norm.weight"])])


# --- vLLM's factories -------------------------------------------------------------------------------------------------

FIELDS = {"rank": 0, "master_address": "127.0.0.1", "master_port": 1234, "world_size": 3, "deadline": 5.0}


def test_init_info_of_any_registered_backend_gets_the_fields_that_it_has():
    nccl = init_info("nccl", FIELDS, {"packed": False})
    assert (nccl.world_size, nccl.master_port, nccl.packed, nccl.is_sender) == (3, 1234, False, True)
    with pytest.raises(ConfigError, match=r"no weight-transfer backend 'ncl'.*nccl"):
        init_info("ncl", FIELDS, {})
    with pytest.raises(ConfigError, match=r"'nccl'.*bogus.*backend_options"):
        init_info("nccl", FIELDS, {"bogus": 1})


def session_that_chose(backend):
    chosen = Choice(SimpleNamespace(), TransferOptions(backend=backend), "")
    return SimpleNamespace(selection=Selection(engine=None, weights=chosen, rollout=None, scoring=chosen))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings an NCCL")
def test_nccl_is_refused_where_vllm_would_send_nothing_with_it():
    assert "libnccl" in nccl_missing() or "NCCL" in nccl_missing()
    with pytest.raises(ConfigError, match=r"backend='nccl'.*VLLM_NCCL_SO_PATH.*backend='gloo'"):
        backend_of(session_that_chose("nccl"))
    assert backend_of(session_that_chose("auto")) == "gloo"
    assert backend_of(session_that_chose("of_a_third_party")) == "of_a_third_party"


def test_nccl_that_was_switched_off_is_refused(monkeypatch):
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_DISABLE_PYNCCL", True, raising=False)  # vLLM reads the environment once
    nccl_missing.cache_clear()
    try:
        with pytest.raises(ConfigError, match="VLLM_DISABLE_PYNCCL is set"):
            backend_of(session_that_chose("nccl"))
    finally:
        nccl_missing.cache_clear()


def test_gloo_is_registered_once_with_both_factories():
    from trlx_hybrid_vllm.remote import gloo
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    gloo.register()
    gloo.register()
    assert WeightTransferEngineFactory._registry["gloo"]() is gloo.GlooWeightTransferEngine
    assert init_info("gloo", FIELDS, {"bucket_bytes": 7}).bucket_bytes == 7


class Servers:
    """Stands for an engine of three servers with two workers each; remembers what it is asked."""

    servers = (0, 4, 5)
    plan = SimpleNamespace(ranks=2)

    def call(self, method, arguments, deadline):
        self.asked = (method, [list(given) for given in arguments], deadline)
        return [None] * 3


def test_every_worker_of_every_server_has_a_rank_of_its_own():
    engine = Servers()
    client = GroupClient(engine, 9.0)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    method, given, deadline = engine.asked
    assert (method, deadline) == ("init_weight_transfer_engine", 9.0)
    assert [info["rank_offset"] for (info,) in given] == [1, 3, 5]
    client.update_weights([{"worker": i} for i in range(6)])
    assert [[info["worker"] for info in infos] for (infos,) in engine.asked[1]] == [[0, 1], [2, 3], [4, 5]]
    client.update_weights({"names": []})
    assert engine.asked[1] == [[{"names": []}]] * 3
    client.finish_weight_update("7")
    assert engine.asked[1] == [["7"]] * 3


def test_an_error_of_one_end_does_not_wait_for_the_other():
    never, started = threading.Event(), time.monotonic()

    def fails():
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        in_threads(lambda: never.wait(60), fails)
    assert time.monotonic() - started < 30
    never.set()
    assert in_threads(lambda: 1, lambda: 2) == [1, 2]


def test_a_source_reads_what_is_left_of_a_pass():
    from trlx_hybrid.policy.policy import Policy
    from trlx_hybrid_vllm.remote.gloo import metadata_of
    from trlx_hybrid_vllm.remote.sender import PolicySource

    model = tiny_model(dtype=torch.float32)
    source = PolicySource(Policy(lambda: model, None, torch.device("cpu")))
    names = [m.name for m in metadata_of(source)]
    assert names == [name for name, _ in model.named_parameters()]
    source.send_as({names[0]: torch.bfloat16})
    source.begin()
    (name, tensor), *_ = (pair for _, pair in zip(range(3), source))
    assert (name, tensor.dtype) == (names[0], torch.bfloat16)
    assert metadata_of(source)[0].dtype is torch.bfloat16
    source.finish()
    assert list(source) == []
    source.begin()
    assert [name for name, _ in source] == names
    assert source.bytes == sum(p.numel() * 4 for p in model.parameters()) - 2 * tensor.numel()


def test_a_second_start_of_a_server_finds_what_the_first_compiled(tmp_path, monkeypatch):
    """vLLM keeps it under a hash of its config, which has the path of the model's folder in it."""
    monkeypatch.setitem(vars(envs), "VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    hashes, folders = [], []
    for hidden, kept in ((64, True), (64, True), (96, True), (64, False)):
        source = tmp_path / str(hidden)
        tiny_model(hidden_size=hidden).config.save_pretrained(source)
        character_tokenizer().save_pretrained(source)
        files = {file.name: file.read_bytes() for file in source.iterdir()}
        with model_folder(files, kept) as folder:
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
            config = EngineArgs(str(folder), load_format="dummy", dtype="float32", max_model_len=64)
            hashes.append(config.create_engine_config().compute_hash())
        folders.append(folder)
    assert hashes[0] == hashes[1] != hashes[2]
    assert folders[0] == folders[1] != folders[2]
    assert [folder.exists() for folder in folders] == [True, True, True, False]


def test_an_engine_core_that_died_is_told_from_one_that_fails():
    """The first is replaced, the second is an error of the run."""
    server = VLLMServer(None)
    with pytest.raises(ServerDiedError, match="engine core died"):
        asyncio.run(server.check())

    async def sick():
        raise ValueError("no such tensor")

    server._llm = SimpleNamespace(errored=False, check_health=sick)
    with pytest.raises(EngineError, match="could not answer: ValueError: no such tensor") as caught:
        asyncio.run(server.check())
    assert not isinstance(caught.value, ServerDiedError)


def test_a_request_that_vllm_aborts_by_itself_is_sampled_elsewhere():
    """As its engine core does at SIGTERM. Only an interrupted request is returned with what it has."""
    server, event = VLLMServer(None), asyncio.Event()
    output = SimpleNamespace(token_ids=[5, 6], logprobs=None, finish_reason="abort")

    async def generate(prompt, params, request_id):
        yield SimpleNamespace(prompt_token_ids=[1, 2], outputs=[output])

    config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False), speculative_config=None)
    server._llm = SimpleNamespace(generate=generate, model_config=None, vllm_config=config, errored=False)
    sample = functools.partial(server.generate, Request(prompt_ids=[1, 2], seed=0), Sampling(max_tokens=4))
    with pytest.raises(ServerDiedError, match="aborted a request by itself"):
        asyncio.run(sample(event))
    event.set()
    completion = asyncio.run(sample(event))
    assert (completion.token_ids, completion.finish_reason) == ([5, 6], None)


# --- the ids that tokens were sampled from ----------------------------------------------------------------------------


def test_ids_that_vllm_returns_with_each_token_are_taken_before_it_makes_lists_of_them():
    """vLLM returns them on GPUs only; what takes its outputs apart is the same code on CPUs."""
    params = SamplingParams(max_tokens=2, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    processor = OutputProcessor(None, log_stats=False)
    ids = ReturnedIds(
        SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 92), output_processor=processor)
    )
    for name in ("0", "1"):
        processor.add_request(
            EngineCoreRequest(
                request_id=f"{name}-{name * 8}",
                external_req_id=name,
                prompt_token_ids=[5, 6],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
            None,
        )
        asyncio.run(ids.open(name, [9]))

    def outputs(token, *kept, finished=None):
        return [
            EngineCoreOutput(
                f"{name}-{name * 8}",
                [token],
                new_sampling_mask=SamplingMaskLists(np.array(kept, np.int32)),
                finish_reason=finished,
            )
            for name in ("0", "1")
        ]

    processor.process_outputs(outputs(7, 3, 7, 9))
    processor.abort_requests(["1"], internal=False)
    ids.close("1")
    (done,) = processor.process_outputs(outputs(8, 8, finished=FinishReason.LENGTH)).request_outputs
    assert done.outputs[0].token_ids == [7, 8]
    assert done.outputs[0].sampling_mask is None
    support = asyncio.run(ids.take("0", 2, 2))
    assert [support.ids(token).tolist() for token in range(2)] == [[3, 7], [8]]
    with pytest.raises(EngineError, match="did not say which ids it kept for token 0"):
        asyncio.run(ids.take("1", 2, 2))
