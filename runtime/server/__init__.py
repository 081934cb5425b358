"""An OpenAI-compatible HTTP server over one LLM; `pip install nibblelm[serve]` brings what it needs."""
