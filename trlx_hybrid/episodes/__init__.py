"""The parts of conversations with tools that every rollout needs: tools' answers as text, private tokenizers, and turns
whose tool calls cannot be parsed."""
