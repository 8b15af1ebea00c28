"""Text: tokenizers, streaming text, chat templates. Knows nothing of models."""
