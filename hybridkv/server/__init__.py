"""HTTP over the engine: OpenAI's and Anthropic's dialects of one event stream. Needs the extra `server`."""
