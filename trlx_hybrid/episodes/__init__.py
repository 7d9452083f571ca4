"""The parts of conversations with tools that every rollout needs: tools' answers as text, copies of the tokenizer whose
truncation and padding no other code changes, and the handling of turns whose tool calls cannot be parsed."""
