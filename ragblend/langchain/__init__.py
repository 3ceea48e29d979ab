"""Code of the LangChain models and chains. Public names are in `ragblend.llm` and `ragblend.chains`."""
