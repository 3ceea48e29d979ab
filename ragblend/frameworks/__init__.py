"""What LangChain's and LlamaIndex's models share: recognising chunks in what a chain sends, turns, the report."""
