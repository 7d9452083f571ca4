"""What conversations with tools need, whoever runs them: answers as text, tokenizers, turns that cannot be parsed."""
