"""From prompts to completions, seeds included; conversations as data."""
