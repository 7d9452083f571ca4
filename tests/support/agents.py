"""A tiny model that calls a tool, and questions for agents that speak to it by an API."""

from openai import AsyncOpenAI

CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>' for a in (1, 3, 5)]
TURNS = [*CALLS, "a plain answer", "no"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # slow to make
QUESTIONS = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(8)]
