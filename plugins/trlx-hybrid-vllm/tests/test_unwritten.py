"""A tensor that a sync stops writing is found within a few syncs, by whichever path it should have come."""

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig
from trlx_hybrid.errors import SyncError
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_vllm.weights.lora import AdapterSlots
from trlx_hybrid_vllm.weights.shared import SharedSync

SYNCS = 20
"""More than it takes to compare each of the model's tensors once, eight at a time."""


def leave_out(monkeypatch, path, name):
    """From now on, the sync writes all but one tensor into the engine, as a lost write would."""
    if path == "copy":
        write = SharedSync._write
        monkeypatch.setattr(
            SharedSync, "_write", lambda self, sources: write(self, {n: s for n, s in sources.items() if name not in n})
        )
        return
    write = AdapterSlots.write

    def write_all_but_one(self):
        kept = [(slot, slot.a.clone(), slot.b.clone()) for slot in self._slots if name in slot.name]
        moved = write(self)
        for slot, a, b in kept:
            slot.a.copy_(a)
            slot.b.copy_(b)
        return moved

    monkeypatch.setattr(AdapterSlots, "write", write_all_but_one)


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"])
@pytest.mark.parametrize("path", ["copy", "lora"])
def test_a_tensor_that_is_no_longer_written_is_found_within_a_few_syncs(run, monkeypatch, path, name):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if path == "lora" else None
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model(),
        peft_config=adapter,
        use_vllm=True,
        hybrid={"weights": path},
        train=False,
    )
    session, found = finished.trainer.session, None
    for sync in range(SYNCS):
        if sync == 2:
            leave_out(monkeypatch, path, name)
        for p in session.policy.parameters:
            if p.requires_grad:
                p.data.add_(0.01 * torch.randn_like(p))
        session.weights_changed()
        try:
            with session.rollout_phase(training=True):
                pass
        except SyncError as error:
            found = sync, str(error)
            break
    assert found is not None, f"nobody noticed in {SYNCS} syncs"
    assert 2 <= found[0] <= 2 + 4
    assert name in found[1]
