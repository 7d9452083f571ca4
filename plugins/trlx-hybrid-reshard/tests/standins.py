"""A policy, an engine and a session without transformers and vLLM, for the weight sync alone."""

import os
from types import SimpleNamespace

import torch
from torch import nn
from trlx_hybrid.contract.protocols import Region, Regions
from trlx_hybrid.errors import EngineError
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid_reshard.options import ReshardOptions
from trlx_hybrid_reshard.sync import ReshardSync

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, HIDDEN, INNER, PADDED = 11, 8, 12, 16


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN, bias=False)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.norm(hidden) @ self.embed.weight.T


class PlainPolicy(Policy):
    """Names in memory are those of the checkpoint."""

    converts = False

    def refuses_gather(self):
        return None


class SlicedEngine:
    """Tensor parallelism over `tp` ranks: up projections by rows, down ones by columns, the vocabulary padded.

    `reason` is what it says against being written to.
    """

    def __init__(self, tp, dtype=torch.bfloat16, reason=None):
        self.dtype, self.weights_lost, self.written, self._reason = dtype, True, 0, reason
        self._tp, self._at = tp, RANK % tp
        self.memory = {}
        self.fused = {}

    def box(self, name, shape):
        ranges = [(0, size) for size in shape]
        if name == "embed.weight":
            step = PADDED // self._tp
            ranges[0] = (min(step * self._at, VOCABULARY), min(step * (self._at + 1), VOCABULARY))
        elif ".0." in name[8:] or name.endswith("1.weight"):
            dim = 1 if name.endswith("1.weight") else 0
            step = shape[dim] // self._tp
            ranges[dim] = (step * self._at, step * (self._at + 1))
        return tuple(ranges)

    def regions(self, policy):
        if self._reason is not None:
            raise EngineError(self._reason)
        found, padding = {}, []
        for name, p in policy.base_parameters().items():
            box = self.box(name, p.shape)
            shape = [b - a for a, b in box]
            if name == "embed.weight":
                whole = self.memory[name] = torch.full((PADDED // self._tp, HIDDEN), torch.nan, dtype=self.dtype)
                padding.append(whole[shape[0] :])
                view = whole[: shape[0]]
            else:
                view = self.memory[name] = torch.full(shape, torch.nan, dtype=self.dtype)
            if view.numel():
                found[name] = [Region(box, view)]
        # The norm is kept twice, as an engine may keep a tied weight.
        self.memory["again"] = torch.full_like(self.memory["norm.weight"], torch.nan)
        found["norm.weight"].append(Region(found["norm.weight"][0].box, self.memory["again"]))
        return Regions(found, padding)

    def weights_written(self):
        self.weights_lost, self.written = False, self.written + 1

    def poison(self, names=None):
        for name in names or self.memory:
            self.memory[name].fill_(torch.nan)

    def wrong(self, policy):
        """Names of memory that does not hold the policy's bits; collective."""
        odd = []
        for name, p in policy.base_parameters().items():
            full = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
            want = full[tuple(slice(a, b) for a, b in self.box(name, p.shape))].to(self.dtype)
            have = self.memory[name]
            if name == "embed.weight":
                want = torch.cat([want, want.new_zeros(have.shape[0] - want.shape[0], HIDDEN)])
            odd += [name] * (not torch.equal(have, want))
        return odd + ["again"] * (not torch.equal(self.memory["again"], self.memory["norm.weight"]))


def session_of(model, engine, deadline=20.0, bucket_bytes=200, stall=20.0):
    """A session as the weight sync sees it, and the weight sync."""
    policy = PlainPolicy(lambda: model, None, torch.device("cpu"))
    ranks = SimpleNamespace(rank=RANK, world=WORLD)
    session = SimpleNamespace(policy=policy, ranks=ranks, live_engine=engine, weight_version=0)
    return session, ReshardSync(session, ReshardOptions(deadline=deadline, stall=stall, bucket_bytes=bucket_bytes))
