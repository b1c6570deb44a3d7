"""HTTP server with OpenAI's API: protocol, limits, and the thread that runs the inference engine."""
