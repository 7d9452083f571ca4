"""Agents of frameworks, as PyPI has them, with their own clients and tool loops; `make test-agents` installs them."""

import pytest

from tests.support.agents import CLIENT

pytestmark = pytest.mark.slow


def check(done, batches):
    """Each episode is trained on, some are shown what a tool returned, and each is one conversation."""
    log = done.trainer.state.log_history[0]
    assert log["hybrid/trajectories/failed"] == 0
    assert log["hybrid/turns/mean"] > 1
    assert all(any(trajectory.loss_mask) for trajectory in batches[0])
    assert log["hybrid/agents/branches"] == 1
    tokenizer = done.trainer.processing_class
    assert any("<tool_response>" in tokenizer.decode(trajectory.completion_ids) for trajectory in batches[0])


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_the_openai_agents_sdk(train, api):
    sdk = pytest.importorskip("agents")
    sdk.set_tracing_disabled(True)

    @sdk.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(base_url, row):
        model = getattr(sdk, api)(model="policy", openai_client=CLIENT.with_options(base_url=base_url))
        adder = sdk.Agent(name="adder", instructions="Add.", model=model, tools=[add])
        try:
            result = await sdk.Runner.run(adder, row["prompt"][0]["content"], max_turns=4)
        except sdk.MaxTurnsExceeded:
            return 0.0
        return float(len(result.new_items))

    check(*train(agent, max_steps=1, max_completion_length=400, vllm_max_model_length=2048))


def test_smolagents(train):
    """It sends what the model said as text of its own, so each of its steps is a branch."""
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    def agent(base_url, row):
        model = smolagents.OpenAIServerModel(model_id="policy", api_base=base_url, api_key="none")
        templates = smolagents.PromptTemplates(**smolagents.agents.EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Add."})
        adder = smolagents.ToolCallingAgent([add], model, prompt_templates=templates, max_steps=2, verbosity_level=0)
        adder.run(row["prompt"][0]["content"])
        return float(len(adder.memory.steps))

    done, batches = train(agent, max_steps=1, max_completion_length=1500, vllm_max_model_length=2048)
    log = done.trainer.state.log_history[0]
    assert log["hybrid/trajectories/failed"] == 0
    assert log["hybrid/agents/branches"] > 1
    assert all(any(trajectory.loss_mask) for trajectory in batches[0])


def test_langgraph(train):
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(base_url, row):
        model = ChatOpenAI(model="policy", base_url=base_url, api_key="none")
        graph = prebuilt.create_react_agent(model, [add])
        try:
            said = await graph.ainvoke({"messages": row["prompt"]}, {"recursion_limit": 8})
        except GraphRecursionError:
            return 0.0
        return float(len(said["messages"]))

    check(*train(agent, max_steps=1, max_completion_length=400, vllm_max_model_length=2048))
