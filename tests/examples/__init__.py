"""Worked examples of `replace_embeddings` and `lookahead`, executed by `tests/test_replace.py`."""
