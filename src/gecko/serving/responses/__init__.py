"""OpenAI's Responses API: fields, routes, replies, and the store of the states after responses."""
