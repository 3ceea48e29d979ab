"""Code for both LangChain's and LlamaIndex's models: messages, settings, engines, tools."""
