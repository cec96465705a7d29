"""This engine against llama.cpp and transformers: same machine, same weights, in turn. See `__main__.py`."""
