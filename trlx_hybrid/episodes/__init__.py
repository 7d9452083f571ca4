"""Parts of conversations with tools, whoever runs them: answers as text, tokenizers, turns that cannot be parsed."""
