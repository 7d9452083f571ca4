"""Components that leave out what an engine says of each token beside its log-prob: its support, or its experts."""

from trlx_hybrid.contract.protocols import Rollout, Scoring
from trlx_hybrid.plugins.hookspecs import hookimpl


class Forgetful(Rollout):
    """Hands on completions with nothing but their tokens and log-probs."""

    name, converses = "forgetful", False

    def run(self, session, requests, sampling):
        sampled = session.live_engine.generate(requests, sampling)
        return [
            type(c)(token_ids=c.token_ids, logprobs=c.logprobs, logprob_token_ids=c.logprob_token_ids) for c in sampled
        ]


class Careless(Scoring):
    """Scores rows by their tokens alone."""

    name = "careless"

    def score(self, rows):
        labels = rows.input_ids.roll(-1, dims=1)
        return rows.forward(labels, input_ids=rows.input_ids, attention_mask=rows.attention_mask)


class Offers:
    @hookimpl
    def trlx_register(self, registry):
        registry.offer("rollout", "forgetful", lambda session, options: Forgetful())
        registry.offer("scoring", "careless", lambda session, options: Careless())
