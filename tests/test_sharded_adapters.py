"""Adapters of a policy under FSDP2, also of kinds that PEFT does not merge into shards, reach the engine."""

from pathlib import Path

from trlx_hybrid.testing.processes import rank_reports


def test_an_adapter_of_any_kind_is_merged_from_its_shards(tmp_path):
    for report in rank_reports(Path(__file__).parent / "scripts" / "sharded_adapters.py", tmp_path, count=2):
        assert {"lora", "dora", "ia3", "oft"} < report.keys()
        for kind, found in report.items():
            assert max(found["gaps"]) < 2e-5, kind  # of logits, which are not log-probs yet
            assert found["same"], kind
            assert found["sharded"], kind
