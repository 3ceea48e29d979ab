"""What LangChain's and LlamaIndex's models share: messages, settings, engines, tools."""
