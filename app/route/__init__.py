"""A router in front of OpenAI-compatible servers: vLLM, SGLang, llama-server, Troupe."""
